"""How fast a cache decodes."""

from __future__ import annotations

import time

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine

SPEED_TOKENS = 16


def decode_rate(engine: Engine, cache: CompactedCache, token: int, tokens: int = SPEED_TOKENS) -> float | None:
    """Return greedy tokens per second of one sequence behind a cache, which stays as it is; None where it has no room.

    token: the first one fed. One step before the clock starts pays for what only the first pays for.
    """
    if cache.next_position + tokens + 1 > engine.geometry.max_positions:
        return None
    fork = cache.fork()
    fork.reserve(fork.tail_length + tokens + 1)
    token = int(engine.next_token_logits(fork, [token])[-1].argmax())
    begun = time.perf_counter()
    for _ in range(tokens):
        token = int(engine.next_token_logits(fork, [token])[-1].argmax())
    return tokens / (time.perf_counter() - begun)
