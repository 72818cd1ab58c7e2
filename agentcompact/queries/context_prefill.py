"""Context-prefill reference queries: those of the prefill itself."""

from __future__ import annotations

from agentcompact.cache import CapturedQueries, CompactedCache
from agentcompact.engines import CAPTURES_QUERIES, Engine, Progress
from agentcompact.errors import CacheError, CapabilityError

RECENT = 64
"""Tokens since the last compaction whose queries are enough for compacting again."""


def context_prefill_queries(
    engine: Engine, cache: CompactedCache, start: int, stop: int, seed: int, progress: Progress | None = None
) -> CapturedQueries:
    """Return post-RoPE queries of the tokens [start, stop), of as many positions as the engine's settings hold.

    Those captured while the cache was prefilled are used as they are; a cache that has none (one read from a file,
    say) gets them from one more pass over its token ids, which counts as compaction work. Raises CacheError where
    the token ids are not known either, CapabilityError where the engine captures nothing. Where the span was compacted
    in part, that pass reads what came since, behind what is kept: a conversation that is compacted again and again
    would otherwise be read from its beginning each time.
    """
    held = cache.captured
    if held is not None and held.covers(start, stop):
        return held
    if CAPTURES_QUERIES not in engine.capabilities:
        raise CapabilityError("this strategy needs reference queries, and the engine cannot capture any")
    if len(cache.token_ids) < stop:
        raise CacheError("the cache has neither captured queries nor its token ids: prefill the text again")
    since = max(start, cache.span_tokens)
    if cache.is_compacted and stop - since >= RECENT:
        behind = cache.fork()
        try:
            behind.truncate(since)
        except CacheError:  # sliding windows may not reach back that far
            pass
        else:
            turn = cache.token_ids[since:stop]
            return engine.capture([turn], seed, after=behind, numbered_from=since, progress=progress)
    return engine.capture([cache.token_ids[:stop]], seed, first=start, progress=progress)
