"""The interface of a strategy, and what strategies share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from agentcompact.cache import CompactedCache, Report, Span
from agentcompact.engines import CAPTURES_QUERIES, Engine, Progress
from agentcompact.errors import BudgetError, CapabilityError, UnsupportedModelError
from agentcompact.settings import build_settings


class StrategySettings(BaseModel):
    """Base of every strategy's settings; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class CompactionRequest:
    """What to compact, and into how much.

    engine, cache: the model and the cache, of one sequence. budget: entries per layer and KV head, on average.
    start, stop: the span in token positions, the whole cache by default. focus: what the compaction should care
    about, for strategies that take instructions. seed: of every random choice. checkpoint: a file in which a
    `resumable` strategy keeps what it has reached, if one is named; resume: whether to go on from it if it is there.
    """

    engine: Engine
    cache: CompactedCache
    budget: int
    start: int = 0
    stop: int | None = None
    focus: str | None = None
    seed: int = 0
    progress: Progress | None = None
    checkpoint: Path | None = None
    resume: bool = False

    @property
    def end(self) -> int:
        """The position behind the span."""
        return self.cache.next_position if self.stop is None else self.stop


@dataclass
class CompactionResult:
    """The new cache, and what was done. The request's cache is as it was."""

    cache: CompactedCache
    report: Report


@dataclass
class Phases:
    """Seconds of the phases of one compaction; the time of a phase within another counts for the inner one alone."""

    seconds: dict[str, float] = field(default_factory=dict)
    _within: list[float] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            taken = time.perf_counter() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._within.pop()
            if self._within:
                self._within[-1] += taken


class Strategy(ABC):
    """A method that turns a cache into a smaller one.

    Subclasses name themselves, say what their settings are and which engine capabilities they need, and are
    registered by `register_strategy` or through the entry-point group `agentcompact.strategies`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the list of strategies."""
    settings_type: ClassVar[type[StrategySettings]] = StrategySettings
    needs: ClassVar[frozenset[str]] = frozenset()
    rewrites: ClassVar[bool] = False
    """Whether it writes a text of its own, so that positions begin anew instead of going on."""
    trains: ClassVar[bool] = False
    """Whether it trains entries, so that they are no originals and a compaction may take hours."""
    learned: ClassVar[bool] = False
    """Whether it needs something that was trained for the model beforehand, which most models do not have."""
    resumable: ClassVar[bool] = False
    """Whether it keeps a request's checkpoint and can go on from it."""

    def __init__(self, /, **settings: Any) -> None:
        """Raises SettingsError for a setting or a value that does not exist."""
        self.settings = build_settings(self.settings_type, settings, f"strategy '{self.name}'")

    @property
    def reads_prefill_queries(self) -> bool:
        """Whether the queries of the prefill should be captured while it runs; recomputing them costs a pass."""
        return CAPTURES_QUERIES in self.needs

    @property
    def takes_focus(self) -> bool:
        """Whether a request's focus changes what is kept."""
        return False

    def compact(self, request: CompactionRequest) -> CompactionResult:
        """Compact the request's span into its budget and return a new cache with a report.

        Raises CapabilityError where the engine cannot give what the strategy needs, BudgetError for an empty span or
        a budget below 1, UnsupportedModelError where no layer can be compacted.
        """
        self._check(request)
        cache, phases = request.cache, Phases()
        spans = [cache.source(index, request.start, request.end) for index, _ in cache.full_layers]
        before = sum(span.entries for span in spans)
        report = Report(
            strategy=self.name,
            settings=self.settings.model_dump(mode="json"),
            seed=request.seed,
            tokens=request.end - request.start,
            budget=request.budget,
            entries_before=before,
            bytes_before=sum(span.nbytes for span in spans),
        )
        if request.focus and not self.takes_focus:
            report.warnings.append(
                f"the focus changed nothing: strategy '{self.name}' takes none as it is set; 'summary', 'ttt' and "
                "queries=self_study of 'attention_matching' do"
            )
        worked = request.engine.counters.compaction_tokens
        if self._is_enough(request, spans):
            report.warnings.append(
                f"nothing was compacted: the budget of {request.budget:,} entries per head is not below the "
                f"{max(max(span.lengths) for span in spans):,} there are"
            )
            compacted, new = cache.replaced(spans, request.start, request.end), spans
        else:
            compacted, new = self.compact_cache(request, spans, phases, report)
        report.compaction_tokens = request.engine.counters.compaction_tokens - worked
        report.entries_after = sum(span.entries for span in new)
        report.bytes_after = sum(span.nbytes for span in new)
        report.seconds = {**phases.seconds, "total": sum(phases.seconds.values())}
        compacted.metadata.reports.append(report)
        return CompactionResult(compacted, report)

    def compact_cache(
        self, request: CompactionRequest, spans: list[Span], phases: Phases, report: Report
    ) -> tuple[CompactedCache, list[Span]]:
        """Return the new cache, and each full layer's entries in it that stand for the request's span.

        A strategy that `rewrites` overrides this; all others give `compact_spans`.
        """
        new = self.compact_spans(request, spans, phases, report)
        return request.cache.replaced(new, request.start, request.end), new

    @abstractmethod
    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        """Return the smaller span of each full layer, given the entries of each."""

    def _is_enough(self, request: CompactionRequest, spans: Sequence[Span]) -> bool:
        """Whether the budget holds everything already."""
        return all(max(span.lengths) <= request.budget for span in spans)

    def check_engine(self, engine: Engine) -> None:
        """Raise CapabilityError or UnsupportedModelError where this engine's caches cannot be compacted."""
        missing = sorted(self.needs - engine.capabilities)
        if missing:
            raise CapabilityError(f"strategy '{self.name}' needs an engine that {', '.join(missing)}")
        if not engine.geometry.full_layers:
            raise UnsupportedModelError(
                f"{engine.geometry.model_type}: all layers slide, so there is nothing to compact"
            )

    def _check(self, request: CompactionRequest) -> None:
        self.check_engine(request.engine)
        if request.budget < 1:
            raise BudgetError(f"budget {request.budget} is too small: at least one entry per head is kept")
        length = request.cache.next_position
        if not 0 <= request.start < request.end <= length:
            raise BudgetError(
                f"positions {request.start:,} to {request.end:,} are no span of the cache's {length:,} tokens"
            )


@dataclass(frozen=True)
class HeadGroup:
    """KV heads of one layer with equally many entries, ready for batched maths.

    keys, values: (heads, n, head_dim). bias, positions: (heads, n). queries: (heads, m, head_dim), the G query heads
    of each KV head one after another. heads: their indices in the layer.
    """

    heads: range
    keys: Tensor
    values: Tensor
    bias: Tensor
    positions: Tensor
    queries: Tensor


def head_groups(span: Span, queries: Tensor) -> Iterator[HeadGroup]:
    """Split a span into groups of heads with equally many entries; queries: (query_heads, m, head_dim)."""
    group_size = queries.shape[0] // span.heads
    pooled = queries.reshape(span.heads, group_size * queries.shape[1], queries.shape[2])
    if span.is_uniform:
        keys, values, bias, positions = (span.dense(t) for t in (span.keys, span.values, span.bias, span.positions))
        yield HeadGroup(range(span.heads), keys, values, bias, positions, pooled)
        return
    for head, (keys, values, bias, positions) in enumerate(span):
        rows = slice(head, head + 1)
        yield HeadGroup(range(head, head + 1), keys[None], values[None], bias[None], positions[None], pooled[rows])
