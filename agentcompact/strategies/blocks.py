"""Compaction block by block: a context is prefilled and compacted in parts, so that memory is bounded by the part."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentcompact.cache import CompactedCache, Report
from agentcompact.engines import Engine, Progress
from agentcompact.errors import BudgetError
from agentcompact.settings import resolve_budget
from agentcompact.strategies.base import CompactionRequest, Strategy

SMALLEST_BLOCK = 16
"""Tokens of a block at least: a smaller one has nothing to choose from."""


def compact_in_blocks(
    strategy: Strategy,
    engine: Engine,
    token_ids: Sequence[int],
    *,
    block: int,
    ratio: float | None = None,
    budget: int | None = None,
    rolling: bool = False,
    focus: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CompactedCache:
    """Prefill and compact a context in blocks of `block` tokens; each is read behind what is kept of those before it.

    A budget is shared by the blocks in proportion to their tokens. The blocks make one cache with one report; its
    memory never holds more than the kept entries and one block's. rolling: each block is compacted together with what
    was kept of those before it, always into the whole budget. Raises BudgetError for a block that is too small, or
    a strategy that writes other text and so has no place for blocks.
    """
    if block < SMALLEST_BLOCK:
        raise BudgetError(f"a block of {block} tokens is too small: at least {SMALLEST_BLOCK} are needed")
    if strategy.rewrites:
        raise BudgetError(f"strategy '{strategy.name}' writes a text of its own and cannot compact in blocks")
    total, cache = len(token_ids), engine.new_cache()
    engine.check_room(0, total)
    reports: list[Report] = []
    for start in range(0, total, block):
        stop = min(start + block, total)
        cache = engine.prefill(
            token_ids[start:stop],
            cache,
            capture_seed=seed if strategy.reads_prefill_queries else None,
            progress=_of_whole(progress, start, total),
        )
        if rolling:
            kept = resolve_budget(total, ratio=ratio, budget=budget)
        elif budget is None:
            kept = resolve_budget(stop - start, ratio=ratio)
        else:
            kept = max(1, math.floor(budget * stop / total) - math.floor(budget * start / total))
        request = CompactionRequest(
            engine=engine,
            cache=cache,
            budget=kept,
            start=0 if rolling else start,
            stop=stop,
            focus=focus,
            seed=seed,
            progress=progress,
        )
        cache = strategy.compact(request).cache
        cache.captured = None
        reports.append(cache.metadata.reports.pop())
    cache.metadata.reports.append(_rolled_report(reports) if rolling else joined_report(reports))
    return cache


def _rolled_report(reports: Sequence[Report]) -> Report:
    """Return one report for compactions each of which took in what the one before it had left."""
    joined, last = joined_report(reports), reports[-1]
    return joined.model_copy(
        update={
            "tokens": last.tokens,
            "budget": last.budget,
            "entries_before": joined.entries_before - (joined.entries_after - last.entries_after),
            "entries_after": last.entries_after,
            "bytes_before": joined.bytes_before - (joined.bytes_after - last.bytes_after),
            "bytes_after": last.bytes_after,
        }
    )


def joined_report(reports: Sequence[Report]) -> Report:
    """Return one report for blocks that were compacted one after another."""
    first = reports[0]
    trained = [report.training for report in reports if report.training]
    seconds: dict[str, float] = {}
    for report in reports:
        for phase, taken in report.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + taken
    summed = ("tokens", "budget", "entries_before", "entries_after", "bytes_before", "bytes_after", "compaction_tokens")
    return first.model_copy(
        update={
            **{name: sum(getattr(report, name) for report in reports) for name in summed},
            "seconds": seconds,
            "warnings": list(dict.fromkeys(warning for report in reports for warning in report.warnings)),
            "training": {"losses": {}, "blocks": trained} if len(trained) > 1 else first.training,
            "blocks": len(reports),
        }
    )


def _of_whole(progress: Progress | None, start: int, total: int) -> Progress | None:
    """Report the prefill of a block as a part of the whole."""
    if progress is None:
        return None
    told = progress
    return lambda phase, done, _: told(phase, start + done, total)
