"""What the eviction methods share: scores of all entries, counts by a budget, and the best entries as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agentcompact.cache import CapturedQueries, Report, Span
from agentcompact.engines import CAPTURES_QUERIES, Engine
from agentcompact.fitting.budgets import BudgetKind, allocate, check_shares, read_shares
from agentcompact.fitting.selection import top_entries
from agentcompact.queries import context_prefill_queries
from agentcompact.strategies.base import CompactionRequest, HeadGroup, Phases, Strategy, StrategySettings, head_groups

KEPT_FIRST = 2.0**100
"""Above any method's score: where the scores of entries begin that are kept whatever was measured."""


class EvictionSettings(StrategySettings):
    budgets: BudgetKind = Field(
        "uniform",
        description="entries of each head: equally many; by one ranking over all layers and heads (global) or within "
        "each layer (adakv); fewer in deeper layers (pyramid); or in the proportions of a file",
    )
    floor: float = Field(
        0.0, ge=0, le=1, description="global, adakv: fraction of the budget that every head gets, whatever the ranking"
    )
    budgets_file: str | None = Field(
        None, description="JSON for budgets=file: a list per layer with a proportion for each KV head"
    )
    sinks: int = Field(4, ge=0, description="first entries that are always kept, at most the budget")

    @model_validator(mode="after")
    def _has_its_file(self) -> EvictionSettings:
        if self.budgets == "file" and self.budgets_file is None:
            raise ValueError("budgets=file needs a budgets_file")
        return self


class Eviction(Strategy):
    """Base of the methods that keep the entries with the highest scores, their biases and positions unchanged."""

    settings_type = EvictionSettings
    settings: EvictionSettings

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        shares = self._shares()
        with phases.phase("reference queries"):
            captured = self.find_queries(request)
        scores = []
        for place, (span, (index, _)) in enumerate(zip(spans, request.cache.full_layers, strict=True)):
            with phases.phase("scores"):
                heads = self.score_layer(request, index, span, captured)
                scores.append([self._with_sinks(head, request.budget) for head in heads])
            if request.progress is not None:
                request.progress(f"{self.name}: scores", place + 1, len(spans))
        with phases.phase("selection"):
            counts = allocate(self.settings.budgets, scores, request.budget, shares, self.settings.floor)
            return [_best(*layer) for layer in zip(spans, scores, counts, strict=True)]

    def check_engine(self, engine: Engine) -> None:
        super().check_engine(engine)
        shares = self._shares()
        if shares is not None:
            check_shares(shares, [engine.geometry.kv_heads] * len(engine.geometry.full_layers))

    def _shares(self) -> list[list[float]] | None:
        """Read the file of proportions, where there is one to go by."""
        path = self.settings.budgets_file if self.settings.budgets == "file" else None
        return None if path is None else read_shares(path)

    def find_queries(self, request: CompactionRequest) -> CapturedQueries | None:
        """Return the queries that the scores are made from, or None where they need none."""
        return None

    @abstractmethod
    def score_layer(
        self, request: CompactionRequest, layer: int, span: Span, captured: CapturedQueries | None
    ) -> list[Tensor]:
        """Return the scores of each head's entries, (n,) float32, at least 0."""

    def _with_sinks(self, scores: Tensor, budget: int) -> Tensor:
        """Put the first entries of a head above all others."""
        scores = scores.clone()
        scores[: min(self.settings.sinks, budget)] = float("inf")
        return scores

    def _is_enough(self, request: CompactionRequest, spans: Sequence[Span]) -> bool:
        if self.settings.budgets == "uniform":
            return super()._is_enough(request, spans)
        parts = [[span] for span in spans] if self.settings.budgets == "adakv" else [list(spans)]
        return all(sum(s.entries for s in part) <= request.budget * sum(s.heads for s in part) for part in parts)


class QueryEviction(Eviction):
    """Base of the methods that score entries by queries; those of the prefill unless `find_queries` says otherwise."""

    needs = frozenset({CAPTURES_QUERIES})

    def find_queries(self, request: CompactionRequest) -> CapturedQueries:
        return context_prefill_queries(
            request.engine, request.cache, request.start, request.end, request.seed, request.progress
        )

    def range_of_queries(self, request: CompactionRequest) -> tuple[int, int | None]:
        """Return the positions [start, stop) whose queries count among those found; None is no end."""
        return request.start, request.end

    def score_layer(
        self, request: CompactionRequest, layer: int, span: Span, captured: CapturedQueries | None
    ) -> list[Tensor]:
        if captured is None:
            captured = self.find_queries(request)
        if span.entries == 0:
            return [span.bias] * span.heads
        scores: list[Tensor] = []
        for group in head_groups(span, captured.layer(layer, *self.range_of_queries(request))):
            empty = group.keys.shape[1] == 0  # a compacted head may have kept nothing of this part of the document
            scores.extend(group.bias.float() if empty else self.score_group(request, layer, group, captured))
        return scores

    @abstractmethod
    def score_group(
        self, request: CompactionRequest, layer: int, group: HeadGroup, captured: CapturedQueries
    ) -> Tensor:
        """Return the scores (heads, n) of a group's entries, of which there is at least one a head."""

    def query_positions(self, request: CompactionRequest, captured: CapturedQueries) -> Tensor:
        """Return the positions of a group's pooled queries, (G * m,), alike for all KV heads."""
        positions = captured.positions_within(*self.range_of_queries(request))
        return positions.repeat(request.engine.geometry.group)


def keep_latest(scores: Tensor, count: int | Tensor) -> Tensor:
    """Put the last `count` entries of each head above all measured scores, the later the higher.

    scores: (heads, n). count: for all heads, or (heads,).
    """
    n = scores.shape[-1]
    age = torch.arange(n - 1, -1, -1, device=scores.device).expand_as(scores)
    latest = age < (count[:, None].to(age.device) if isinstance(count, Tensor) else count)
    return torch.where(latest, KEPT_FIRST * (2 - age / 2**22), scores)


def _best(span: Span, scores: Sequence[Tensor], counts: Sequence[int]) -> Span:
    """Return the `counts` entries of each head with the highest scores, in their order."""
    heads = []
    for parts, score, count in zip(span, scores, counts, strict=True):
        rows = top_entries(score[None], count)[0].to(span.keys.device)
        heads.append(tuple(part[rows] for part in parts))
    return Span.from_heads(heads)  # type: ignore[arg-type]
