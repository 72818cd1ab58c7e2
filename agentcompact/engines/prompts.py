"""Turning questions into token ids that follow a document."""

from __future__ import annotations

from agentcompact.cache import PromptFormat
from agentcompact.engines.base import Engine


def question_ids(engine: Engine, form: PromptFormat, question: str) -> list[int]:
    """Return the token ids of a question as it follows the document; the answer comes next."""
    chat = form.kind == "chat"
    opening = engine.encode(form.opening, control_tokens=chat) if form.opening else []
    after = engine.encode(form.after_question, control_tokens=chat)
    return [*opening, *engine.encode(form.before_question + question.strip()), *after]
