"""Turning questions into token ids that follow a document."""

from __future__ import annotations

from agentcompact.cache import PromptFormat
from agentcompact.engines.base import Engine


def question_ids(engine: Engine, form: PromptFormat, question: str) -> list[int]:
    """Return the token ids of a question as it follows the document; the answer comes next."""
    after = engine.encode(form.after_question, control_tokens=form.kind == "chat")
    return [*engine.encode(form.before_question + question.strip()), *after]
