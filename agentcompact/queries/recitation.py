"""Rollouts in which the text itself is the answer: what the full cache predicts while it is repeated word for word."""

from __future__ import annotations

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine
from agentcompact.queries.repeat_prefill import repeat_requests
from agentcompact.queries.rollouts import Answer

LENGTH = 64
"""Tokens of the text in one recitation: as long as other rollouts, so that both make one batch without much padding."""


def recitations(engine: Engine, cache: CompactedCache, start: int, stop: int, length: int = LENGTH) -> list[Answer]:
    """Return requests to repeat the tokens [start, stop) from some place on, each answered with `length` of them.

    They are not part of the published method: answers of 24 tokens say little about most of a text, and every part of
    it is needed to repeat it. Raises what `repeat_requests` raises.
    """
    return [Answer(request, part, False) for request, part in repeat_requests(engine, cache, start, stop, length)]
