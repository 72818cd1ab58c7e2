"""Attention matching: select keys, bias them to carry the mass of all keys, and keep or fit their values.

Each named strategy is a choice for the three steps; the steps themselves are in `agentcompact.fitting`.
Sources: Fast KV Compaction via Attention Matching (Zweiger et al. 2026); the write-up "Compaction" (two-pass
selection, uniform redistribution, direct values).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agentcompact.cache import Report, Span
from agentcompact.engines import CAPTURES_QUERIES
from agentcompact.fitting.attention_statistics import AttentionStatistics, attention_statistics
from agentcompact.fitting.budgets import global_budgets
from agentcompact.fitting.fit import fit_bias, fit_values
from agentcompact.fitting.redistribution import redistribute
from agentcompact.fitting.selection import gather_rows, random_rows, top_entries
from agentcompact.queries import context_prefill_queries, repeat_prefill_queries
from agentcompact.strategies.base import (
    CompactionRequest,
    HeadGroup,
    Phases,
    Strategy,
    StrategySettings,
    head_groups,
)

BIAS_LIMIT = 3.0
"""A fitted bias moves an entry's weight by at most this factor's logarithm, as published (but see `bias_bounds`)."""


class AttentionMatchingSettings(StrategySettings):
    """The three steps of attention matching, and what each needs."""

    queries: Literal["context_prefill", "repeat_prefill"] = Field(
        "context_prefill",
        description="reference queries: the prefill's own (free), or of repeating the context (slower, far better)",
    )
    budgets: Literal["uniform", "global"] = Field(
        "uniform",
        description="entries of each head: equally many, or by one ranking over all layers and heads",
    )
    keys: Literal["highest_attention", "two_pass"] = Field(
        "highest_attention", description="score all keys by all queries, or a shortlist only"
    )
    score: Literal["rms", "mean", "max"] = Field(
        "rms", description="how a key's weights over the queries are summed up"
    )
    bias: Literal["nnls", "redistribute", "none"] = Field("nnls", description="how the entries get their biases")
    values: Literal["least_squares", "direct"] = Field("least_squares", description="fitted or original values")
    nnls: Literal["published", "converged"] = Field("published", description="mode of the NNLS fit")
    ridge: float = Field(1e-6, gt=0, allow_inf_nan=False, description="ridge, relative to the Gram matrix's row sums")
    first_pass_queries: int = Field(256, ge=1, description="two_pass: random queries that score all keys")
    shortlist: float = Field(
        5.0, ge=1, le=1e6, allow_inf_nan=False, description="two_pass: keys on the shortlist per entry kept"
    )
    count_rest: bool | None = Field(
        None,
        description="two_pass: add the mass off the shortlist, as the first pass saw it; default: if compacted before",
    )


@dataclass(frozen=True)
class ScoredHeads:
    """A group of heads with the scores that selection goes by.

    candidates: (heads, c) into the group's entries. score, mass: (heads, c), of the candidates; total_mass: (heads,),
    the mean mass that a selection must carry. full: statistics of all keys under all queries, where scoring made them.
    """

    group: HeadGroup
    candidates: Tensor
    score: Tensor
    mass: Tensor
    total_mass: Tensor
    full: AttentionStatistics | None


class AttentionMatching(Strategy):
    """Base of the named presets; not registered under a name of its own."""

    settings_type = AttentionMatchingSettings
    settings: AttentionMatchingSettings
    needs = frozenset({CAPTURES_QUERIES})

    @property
    def reads_prefill_queries(self) -> bool:
        return self.settings.queries == "context_prefill"

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        find = {"context_prefill": context_prefill_queries, "repeat_prefill": repeat_prefill_queries}
        with phases.phase("reference queries"):
            captured = find[self.settings.queries](
                request.engine, request.cache, request.start, request.end, request.seed, request.progress
            )
        whole = self.settings.queries == "repeat_prefill"

        def score(place: int) -> list[ScoredHeads]:
            index = request.cache.full_layers[place][0]
            queries = captured.layer(index) if whole else captured.layer(index, request.start, request.end)
            self._tell(request, "scores" if self.settings.budgets == "global" else "layers", place, len(spans))
            with phases.phase("key selection"):
                return [self._score(group, index, request) for group in head_groups(spans[place], queries)]

        if self.settings.budgets == "uniform":
            counts = [[min(request.budget, n) for n in span.lengths] for span in spans]
            return [self._fit_layer(score(place), counts[place], request, phases) for place in range(len(spans))]
        scored = [score(place) for place in range(len(spans))]
        total = request.budget * sum(span.heads for span in spans)
        shared = global_budgets([[head for part in layer for head in part.score] for layer in scored], total)
        new = []
        for place, layer in enumerate(scored):
            self._tell(request, "layers", place, len(spans))
            new.append(self._fit_layer(layer, shared[place], request, phases))
        return new

    def _score(self, group: HeadGroup, layer: int, request: CompactionRequest) -> ScoredHeads:
        """Score a group's entries by the queries, all of them or a shortlist."""
        n = group.keys.shape[1]
        shortlisted = math.ceil(self.settings.shortlist * request.budget)
        scaling = request.engine.geometry.scaling
        if n == 0:  # a compacted head may have kept nothing of this part of the document
            empty = group.bias.float()
            return ScoredHeads(group, group.positions.long(), empty, empty, empty.sum(dim=1), None)
        if self.settings.keys == "highest_attention" or shortlisted >= n:
            wanted = group.values if self.settings.values == "least_squares" else None
            full = self._statistics(group.queries, group.keys, group.bias, scaling, wanted)
            candidates = torch.arange(n, device=group.keys.device).expand(len(group.heads), n)
            return ScoredHeads(group, candidates, full.score, full.mass, full.mass.sum(dim=1), full)
        rows = torch.stack([self._first_pass_rows(group, head, layer, request.seed) for head in group.heads])
        sample = gather_rows(group.queries, rows.to(group.queries.device))
        first = self._statistics(sample, group.keys, group.bias, scaling)
        candidates = top_entries(first.score, shortlisted)
        second = self._statistics(
            group.queries, gather_rows(group.keys, candidates), gather_rows(group.bias, candidates), scaling
        )
        total = second.mass.sum(dim=1)
        if request.cache.is_compacted if self.settings.count_rest is None else self.settings.count_rest:
            seen = gather_rows(first.mass, candidates).sum(dim=1)
            total = total * first.mass.sum(dim=1) / seen.clamp(min=torch.finfo(seen.dtype).tiny)
        return ScoredHeads(group, candidates, second.score, second.mass, total, None)

    def _fit_layer(
        self, scored: Sequence[ScoredHeads], counts: Sequence[int], request: CompactionRequest, phases: Phases
    ) -> Span:
        """Select `counts` entries of each head of a layer and give them biases and values."""
        heads: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for part in scored:
            wanted = [counts[head] for head in part.group.heads]
            alike = len(set(wanted)) == 1
            slices = [slice(0, len(wanted))] if alike else [slice(h, h + 1) for h in range(len(wanted))]
            for rows in slices:
                heads.extend(zip(*self._fit_heads(part, rows, wanted[rows.start], request, phases), strict=True))
        span = Span.from_heads(heads)
        return span.to(dtype=scored[0].group.keys.dtype)

    def _fit_heads(
        self, scored: ScoredHeads, rows: slice, count: int, request: CompactionRequest, phases: Phases
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (keys, values, bias, positions) of `count` entries for each of these heads of a group."""
        group, scaling = scored.group, request.engine.geometry.scaling
        n = group.keys.shape[1]
        if count >= n:
            return group.keys[rows], group.values[rows], group.bias[rows], group.positions[rows]
        with phases.phase("key selection"):
            chosen = top_entries(scored.score[rows], count)
            indices = gather_rows(scored.candidates[rows], chosen)
            keys, values, bias, positions = (
                gather_rows(t[rows], indices) for t in (group.keys, group.values, group.bias, group.positions)
            )
            queries, full = group.queries[rows].float(), None
            if self.settings.bias == "nnls" or self.settings.values == "least_squares":
                full = self._full_statistics(scored, rows, scaling)
        lower, upper = bias_bounds(n, count)
        with phases.phase("bias"):
            if self.settings.bias == "redistribute":
                mass = gather_rows(scored.mass[rows], chosen)
                bias = redistribute(mass, scored.total_mass[rows], bias, lower, upper)
            elif self.settings.bias == "nnls" and full is not None:
                bias = fit_bias(
                    queries, keys.float(), bias, scaling, full.log_normalizer, full.row_maximum,
                    lower, upper, self.settings.nnls,
                )  # fmt: skip
        with phases.phase("values"):
            if self.settings.values == "least_squares" and full is not None and full.output is not None:
                values = fit_values(
                    queries, keys.float(), values.float(), bias, scaling, full.output, self.settings.ridge
                )
        return keys, values, bias, positions

    def _full_statistics(self, scored: ScoredHeads, rows: slice, scaling: float) -> AttentionStatistics:
        """Statistics over all keys of these heads: the scoring's own, or made now where it saw a shortlist only."""
        if scored.full is not None:
            return scored.full.of_heads(rows)
        group = scored.group
        wanted = group.values[rows] if self.settings.values == "least_squares" else None
        return self._statistics(group.queries[rows], group.keys[rows], group.bias[rows], scaling, wanted)

    def _statistics(
        self, queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, values: Tensor | None = None
    ) -> AttentionStatistics:
        return attention_statistics(queries, keys, bias, scaling, values, score=self.settings.score)

    def _first_pass_rows(self, group: HeadGroup, head: int, layer: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(((seed * 1_000_003 + layer) * 1_009 + head) % 2**63)
        return random_rows(group.queries.shape[1], self.settings.first_pass_queries, generator)

    def _is_enough(self, request: CompactionRequest, spans: Sequence[Span]) -> bool:
        if self.settings.budgets == "uniform":
            return super()._is_enough(request, spans)
        return sum(span.entries for span in spans) <= request.budget * sum(span.heads for span in spans)

    def _tell(self, request: CompactionRequest, what: str, done: int, total: int) -> None:
        if request.progress is not None:
            request.progress(f"{self.name}: {what}", done + 1, total)


def bias_bounds(entries: int, budget: int) -> tuple[float, float]:
    """Return the least and the most that may be added to an entry's bias when `entries` become `budget`.

    -3 and 3 as published; at q = 0 the mean weight must reach entries / budget, so beyond that ratio of e^3 the upper
    bound grows to twice it.
    """
    return -BIAS_LIMIT, max(BIAS_LIMIT, math.log(2 * entries / budget))
