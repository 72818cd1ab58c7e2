"""Carrying out a compaction: range by range, measured, tried again where it falls short, and never half done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, Field

from agentcompact.cache import CompactedCache, Report
from agentcompact.engines import Engine, Progress
from agentcompact.errors import AgentCompactError, CacheError
from agentcompact.session.context import Context, HeldMessage
from agentcompact.session.fidelity import Fidelity, measure_fidelity
from agentcompact.session.planning import CompactionPlan, Range, held_in
from agentcompact.session.policy import SessionPolicy
from agentcompact.strategies import CompactionRequest, Strategy, make_strategy


class CompactionReport(BaseModel):
    """What one compaction of a conversation did, and how much the model noticed.

    tokens: logical tokens of what was compacted. held_before, held_after: held positions of the whole session. kept:
    messages at the end that stayed as they are. Compaction and probe tokens are counted apart from the conversation's.
    moved: by how many positions keys were moved down with it or since the last report. attempts: what was tried before.
    """

    strategy: str
    settings: dict[str, Any] = Field(default_factory=dict)
    automatic: bool = False
    focus: str = ""
    tokens: int = 0
    budget: int = 0
    held_before: float = 0
    held_after: float = 0
    entries_before: int = 0
    entries_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0
    compaction_tokens: int = 0
    probe_tokens: int = 0
    fidelity: Fidelity = Field(default_factory=Fidelity)
    kept: int = 0
    moved: int = 0
    summary: str = ""
    attempts: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)


class FidelityError(CacheError):
    """A compaction that changed what the model says more than the policy allows; nothing was changed."""


@dataclass
class Compacted:
    """A compacted cache, its report, and where the ranges lie now: (start, stop) before -> (start, stop) after."""

    cache: CompactedCache
    report: CompactionReport
    moves: list[tuple[Range, Range]]
    rewrote: bool


@dataclass
class _Attempt:
    """One way to carry out a plan."""

    strategy: Strategy
    budgets: list[int]


@dataclass
class _Made:
    cache: CompactedCache
    moves: list[tuple[Range, Range]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)


def compact_conversation(
    engine: Engine,
    cache: CompactedCache,
    plan: CompactionPlan,
    policy: SessionPolicy,
    *,
    focus: str | None = None,
    automatic: bool = False,
    most: float | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Compact a plan's ranges and measure it; the given cache stays as it is.

    most: held positions that the session may have afterwards. Where the strategy fails, frees too little, or is less
    faithful than the policy asks, other ways are tried: more entries, queries of a repeat pass, the policy's second
    strategy. What freed too little is kept where no other way does better. Raises the first failure, or FidelityError
    where nothing is faithful enough.
    """
    begun, counters = time.perf_counter(), engine.counters
    worked, probed = counters.compaction_tokens, counters.probe_tokens
    notes: list[str] = []
    failure: AgentCompactError | None = None
    least: Compacted | None = None
    for attempt in _attempts(engine, cache, plan, policy, most):
        try:
            made = _carried_out(engine, cache, plan, attempt, policy, focus, progress)
        except AgentCompactError as error:
            failure = failure or error
            notes.append(f"{attempt.strategy.name}: {error}")
            continue
        fidelity = _fidelity(engine, cache, made)
        if policy.min_fidelity is not None and fidelity.top1 is not None and fidelity.top1 < policy.min_fidelity:
            notes.append(f"{_described(attempt)}: top-1 agreement {fidelity.top1:.0%}")
            failure = FidelityError(
                f"no compaction reached the top-1 agreement of {policy.min_fidelity:.0%} that min_fidelity asks for "
                f"({'; '.join(notes)}): nothing was changed. Lower min_fidelity or the ratio, or keep more"
            )
            continue
        report = _report(cache, made, attempt, plan, fidelity, notes)
        report.automatic, report.focus, report.seconds = automatic, focus or "", time.perf_counter() - begun
        report.compaction_tokens = counters.compaction_tokens - worked
        report.probe_tokens = counters.probe_tokens - probed
        done = Compacted(made.cache, report, made.moves, attempt.strategy.rewrites)
        if most is None or report.held_after <= most:
            return done
        notes.append(f"{_described(attempt)}: {report.held_after:,.0f} positions held, where {most:,.0f} are wanted")
        least = done if least is None or report.held_after < least.report.held_after else least
    if least is not None:
        return least
    raise failure or CacheError("no compaction could be tried")


def _attempts(
    engine: Engine, cache: CompactedCache, plan: CompactionPlan, policy: SessionPolicy, most: float | None
) -> list[_Attempt]:
    """Return the ways to carry out a plan, in the order in which they are tried until one will do."""
    first = make_strategy(policy.strategy, **policy.settings)
    ways = [_Attempt(first, plan.budgets)]
    if policy.min_fidelity is not None:
        holding = [held_in(cache, *each) for each in plan.ranges]
        room = sum(plan.budgets) if most is None else most - (plan.held_before - sum(holding))
        wider = [min(2 * budget, int(held) - 1) for budget, held in zip(plan.budgets, holding, strict=True)]
        if sum(wider) > sum(plan.budgets) and (most is None or sum(wider) <= room) and min(wider) > 0:
            ways.append(_Attempt(first, wider))
        queries = getattr(first.settings, "queries", None)
        if isinstance(queries, str) and "repeat_prefill" not in queries:
            better = make_strategy(policy.strategy, **{**policy.settings, "queries": "repeat_prefill"})
            ways.append(_Attempt(better, plan.budgets))
    if policy.second_strategy is not None:
        ways.append(_Attempt(make_strategy(policy.second_strategy), plan.budgets))
    first.check_engine(engine)
    return ways


def _carried_out(
    engine: Engine,
    cache: CompactedCache,
    plan: CompactionPlan,
    attempt: _Attempt,
    policy: SessionPolicy,
    focus: str | None,
    progress: Progress | None,
) -> _Made:
    """Compact each range, those behind a rewritten one where they are by then. Raises CacheError for no gain."""
    made, shift = _Made(cache), 0
    for (start, stop), budget in zip(plan.ranges, attempt.budgets, strict=True):
        request = CompactionRequest(
            engine=engine,
            cache=made.cache,
            budget=budget,
            start=start + shift,
            stop=stop + shift,
            focus=focus,
            seed=policy.seed,
            progress=progress,
        )
        result = attempt.strategy.compact(request)
        grown = result.cache.next_position - made.cache.next_position
        made.moves.append(((start, stop), (start + shift, stop + shift + grown)))
        made.cache, shift = result.cache, shift + grown
        made.reports.append(made.cache.metadata.reports.pop())
    if not made.cache.entries < cache.entries:
        raise CacheError("it made nothing smaller")
    made.cache.captured = None
    return made


def _fidelity(engine: Engine, cache: CompactedCache, made: _Made) -> Fidelity:
    (_, before), (_, after) = made.moves[-1]
    known = len(cache.token_ids) == cache.next_position
    tail: Sequence[int] = cache.token_ids[before:] if known else []
    return measure_fidelity(engine, cache, made.cache, (before, after), tail)


def _report(
    cache: CompactedCache, made: _Made, attempt: _Attempt, plan: CompactionPlan, fidelity: Fidelity, notes: list[str]
) -> CompactionReport:
    return CompactionReport(
        strategy=attempt.strategy.name,
        settings=attempt.strategy.settings.model_dump(mode="json", exclude_unset=True),
        tokens=plan.tokens,
        budget=sum(attempt.budgets),
        held_before=cache.held_positions,
        held_after=made.cache.held_positions,
        entries_before=cache.entries,
        entries_after=made.cache.entries,
        bytes_before=cache.nbytes,
        bytes_after=made.cache.nbytes,
        fidelity=fidelity,
        kept=plan.kept,
        summary="\n\n".join(report.summary for report in made.reports if report.summary),
        attempts=notes,
        warnings=list(dict.fromkeys(warning for report in made.reports for warning in report.warnings)),
    )


def _described(attempt: _Attempt) -> str:
    return f"{attempt.strategy.name} at {sum(attempt.budgets):,} entries per head"


def context_after(engine: Engine, done: Compacted, held: Sequence[HeldMessage], frozen: int) -> Context:
    """Return the context of a compacted cache: positions as they were, or moved where a strategy wrote other text."""

    def place(position: int) -> int:
        shift = 0
        for (start, stop), (_, new_stop) in done.moves:
            if position >= stop:
                shift = new_stop - stop
            elif position > start:
                return new_stop if done.rewrote else position
        return position + shift

    messages = [replace(each, start=place(each.start), stop=place(each.stop)) for each in held]
    border = done.moves[-1][1][1] if done.rewrote else 0
    return Context(engine, done.cache, messages, max(place(frozen), border))
