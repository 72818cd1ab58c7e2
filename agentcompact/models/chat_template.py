"""Find out what a chat template writes before and after a user's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from agentcompact.errors import InputError
from agentcompact.models.quiet import one_line

_DOCUMENT = "DOCUMENTPLACEHOLDER7f3a91"
_QUESTION = "QUESTIONPLACEHOLDERc02e58"
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class PromptParts:
    """What surrounds a user's message that holds a document and a question.

    The whole prompt is `prefix + document + "\\n\\n" + question + suffix`; `suffix` ends where the
    assistant's reply begins.
    """

    prefix: str
    suffix: str


def split_template(tokenizer: Any, *, system: str | None = None) -> PromptParts | None:
    """Split the prompt that a tokenizer's chat template renders around the user's message.

    Args:
        tokenizer: a transformers tokenizer.
        system: the text of a system message that comes first; None sends no system message (some templates
            then write one of their own).

    Returns:
        The two parts, or None if the tokenizer has no chat template or if the template does not write the
        message exactly once and unchanged.

    Raises:
        InputError: if the template does not take the system message.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    prompt = _render(tokenizer, system)
    message = _DOCUMENT + _BETWEEN + _QUESTION
    if prompt is None or prompt.count(_DOCUMENT) != 1 or prompt.count(_QUESTION) != 1 or message not in prompt:
        return None
    prefix, _, suffix = prompt.partition(message)
    if system is not None and system.strip() not in prefix:
        raise InputError("the model's chat template ignores system messages; leave the system text out")
    return PromptParts(prefix, suffix)


def _render(tokenizer: Any, system: str | None) -> str | None:
    """The rendered prompt with the placeholders in it, or None if the template cannot be rendered."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": _DOCUMENT + _BETWEEN + _QUESTION})
    try:
        prompt = _apply(tokenizer, messages, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        if system is None:
            return None
        raise InputError(f"the model's chat template refuses a system message: {one_line(error)}") from error
    return prompt if isinstance(prompt, str) else None


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
) -> str:
    """Render a conversation by a tokenizer's chat template.

    tools: their JSON schemas. generation_prompt: whether to begin the assistant's reply. Raises InputError where the
    template refuses the messages.
    """
    try:
        text = _apply(
            tokenizer, list(messages), tools=list(tools) if tools else None, add_generation_prompt=generation_prompt
        )
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
    ) as error:  # templates do arithmetic on roles
        raise InputError(f"the model's chat template refuses this conversation: {one_line(error)}") from error
    if not isinstance(text, str):
        raise InputError("the model's chat template gives no text")
    return text


def _apply(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    if "enable_thinking" in str(tokenizer.chat_template):
        options["enable_thinking"] = False
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)
