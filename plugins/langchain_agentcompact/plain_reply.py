"""Replies that may not be tool calls, for tool_choice "none"."""

from __future__ import annotations

from torch import Tensor

from agentcompact.engines import Engine
from langchain_agentcompact.tool_calls import ToolCallForm


class PlainReply:
    """A constraint that lets no reply begin as a tool call; behind other text a stop string ends it before one."""

    def __init__(self, engine: Engine, form: ToolCallForm) -> None:
        opener = form.prefix.strip() or "{"
        spelled = [engine.encode(opener, control_tokens=control) for control in (True, False)]
        self._openers = sorted({ids[0] for ids in spelled if ids})
        self._begun = False
        self.stops = (form.prefix.strip(),) if form.prefix.strip() else ()
        """Strings that end the reply."""

    def allow(self, logits: Tensor) -> Tensor:
        if self._begun:
            return logits
        allowed = logits.clone()
        allowed[:, self._openers] = float("-inf")
        return allowed

    def take(self, token: int) -> int:
        self._begun = True
        return token
