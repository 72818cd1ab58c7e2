"""Repeat-prefill reference queries: those of reading the context out once more, which are much like a question's."""

from __future__ import annotations

from agentcompact.cache import CapturedQueries, CompactedCache
from agentcompact.engines import CAPTURES_QUERIES, Engine, Progress, question_ids
from agentcompact.errors import CacheError, CapabilityError, ContextLengthError

CHUNK = 2048
"""Tokens that one turn is asked to repeat, so that a full repeat never doubles the length."""
SMALLEST_CHUNK = 128
OPENING = 8
"""Tokens of a later chunk that are quoted to say where to begin."""


def repeat_prefill_queries(
    engine: Engine, cache: CompactedCache, start: int, stop: int, seed: int, progress: Progress | None = None
) -> CapturedQueries:
    """Ask for the tokens [start, stop) word for word, with the tokens themselves as the answer; return the queries.

    Each chunk is a turn of its own behind the cache, forgotten afterwards; the queries of request and answer both
    count. The pass costs about a second prefill and is counted as compaction work. At most the engine's
    `capture_bytes` of queries are kept. Raises what `repeat_turns` raises.
    """
    return engine.capture(repeat_turns(engine, cache, start, stop), seed, after=cache, progress=progress)


def repeat_turns(engine: Engine, cache: CompactedCache, start: int, stop: int) -> list[list[int]]:
    """Return the turns that ask for the tokens [start, stop), chunk by chunk, and answer with them.

    Raises what `repeat_requests` raises.
    """
    return [[*request, *part] for request, part in repeat_requests(engine, cache, start, stop, CHUNK)]


def repeat_requests(
    engine: Engine, cache: CompactedCache, start: int, stop: int, most: int
) -> list[tuple[list[int], list[int]]]:
    """Return what asks for each chunk of the tokens [start, stop), and the chunk: at most `most` token ids.

    Raises ContextLengthError where the model's context has no room behind the cache, CacheError where the token ids
    are not known, CapabilityError where the engine captures nothing.
    """
    if CAPTURES_QUERIES not in engine.capabilities:
        raise CapabilityError("repeat-prefill needs reference queries, and the engine cannot capture any")
    if len(cache.token_ids) < stop:
        raise CacheError("repeat-prefill needs the cache's token ids, and they are not known: prefill the text again")
    room = engine.geometry.max_positions - cache.next_position
    request = question_ids(engine, cache.metadata.prompt, "Repeat the text above, word for word.")
    chunk = min(most, room - len(request) - 2 * OPENING)
    if chunk < min(SMALLEST_CHUNK, most, stop - start):
        raise ContextLengthError(
            f"repeat-prefill needs room behind the {cache.next_position:,} tokens in the model's context of "
            f"{engine.geometry.max_positions:,}: use queries=context_prefill, or a model with a longer context"
        )
    turns = []
    for begin in range(start, stop, chunk):
        part = cache.token_ids[begin : min(begin + chunk, stop)]
        if begin > start:
            opening = engine.decode_text(part[:OPENING])
            asked = f'Repeat the text above, word for word, from "{opening}" on.'
            request = question_ids(engine, cache.metadata.prompt, asked)
        turns.append((request, part))
    return turns
