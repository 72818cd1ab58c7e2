"""Attention matching: select keys, bias them to carry the mass of all keys, and keep or fit their values.

Each named preset is a choice for the steps; the steps themselves are in `agentcompact.fitting`.
Sources: Fast KV Compaction via Attention Matching (Zweiger et al. 2026); the write-up "Compaction" (two-pass
selection, uniform redistribution, direct values, query subsets).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.cache import Report, Span
from agentcompact.engines import CAPTURES_QUERIES, Engine
from agentcompact.errors import ContextLengthError
from agentcompact.fitting.attention_statistics import AttentionStatistics, attention_statistics
from agentcompact.fitting.budgets import BudgetKind, allocate, check_shares, read_shares
from agentcompact.fitting.fit import fit_bias, fit_values
from agentcompact.fitting.omp import matching_pursuit
from agentcompact.fitting.query_subsets import select_queries
from agentcompact.fitting.redistribution import redistribute
from agentcompact.fitting.scored_keys import ScoredKeys, score_all_keys, score_shortlist
from agentcompact.fitting.selection import gather_rows, random_rows, top_entries
from agentcompact.queries import ReferenceQueries, Study, reference_queries, reference_turns
from agentcompact.strategies.attention_matching_settings import AttentionMatchingSettings
from agentcompact.strategies.base import CompactionRequest, HeadGroup, Phases, Strategy, head_groups
from agentcompact.strategies.on_policy import compact_on_policy

BIAS_LIMIT = 3.0
"""A fitted bias moves an entry's weight by at most this factor's logarithm, as published (but see `bias_bounds`)."""

Heads = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys, values, biases and positions of some heads with equally many entries."""


@dataclass(frozen=True)
class ScoredHeads:
    """A group of heads with the scores of its keys; scored.candidates are rows of the group's entries."""

    group: HeadGroup
    scored: ScoredKeys


class AttentionMatching(Strategy):
    """Keys, biases and values chosen step by step, each step a setting; the presets are named strategies."""

    name = "attention_matching"
    summary = "select keys, fit biases and values to what all entries gave the reference queries; each step a setting"
    settings_type = AttentionMatchingSettings
    settings: AttentionMatchingSettings
    needs = frozenset({CAPTURES_QUERIES})

    @property
    def reads_prefill_queries(self) -> bool:
        return "context_prefill" in self.settings.query_kinds

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        kind, shares = self.settings.budgets, self._shares()
        if self.settings.on_policy:
            return self._on_policy(request, spans, shares, phases)
        with phases.phase("reference queries"):
            queries = self._queries(request, report)
        indices = [index for index, _ in request.cache.full_layers]
        if kind != "global":
            counts = counts_by_length(kind, spans, request.budget, shares)
            return [
                self.compact_layer(place, span, queries.layer(indices[place]), counts, request, phases)
                for place, span in enumerate(spans)
            ]
        scored = [
            self.score_layer(place, span, queries.layer(indices[place]), None, request, phases)
            for place, span in enumerate(spans)
        ]
        with phases.phase("key selection"):
            counts = allocate(kind, [_scores(layer) for layer in scored], request.budget, floor=self.settings.floor)
        new = []
        for place, layer in enumerate(scored):
            self._tell(request, "entries", place, len(spans))
            new.append(self._fit_layer(layer, counts[place], request, phases))
        return new

    def compact_layer(
        self,
        place: int,
        span: Span,
        queries: Tensor,
        counts: list[list[int]] | None,
        request: CompactionRequest,
        phases: Phases,
    ) -> Span:
        """Compact the entries of the full layer at `place` alone by its queries (query_heads, m, head_dim).

        counts: entries of each head of each layer; None where they come from a ranking within the layer.
        """
        most = None if counts is None else counts[place]
        layer = self.score_layer(place, span, queries, most, request, phases)
        own = most or allocate("adakv", [_scores(layer)], request.budget, floor=self.settings.floor)[0]
        return self._fit_layer(layer, own, request, phases)

    def _on_policy(
        self, request: CompactionRequest, spans: Sequence[Span], shares: list[list[float]] | None, phases: Phases
    ) -> list[Span]:
        """Read the reference turns over what is compacted so far.

        Global budgets need the scores of all layers before the first is compacted, so they come from queries of the
        full cache, in a pass of their own.
        """
        settings, cache, engine = self.settings, request.cache, request.engine
        with phases.phase("reference queries"):
            turns = reference_turns(
                settings.query_kinds, engine, cache, request.start, request.end, request.seed, request.progress,
                self._study(request),
            )  # fmt: skip
        if settings.budgets != "global":
            counts = counts_by_length(settings.budgets, spans, request.budget, shares)
            return compact_on_policy(self, request, spans, turns, counts, phases)
        with phases.phase("reference queries"):
            captured = engine.capture(turns, request.seed, after=cache, progress=request.progress)
        scores = []
        for place, (index, _) in enumerate(cache.full_layers):
            layer = self.score_layer(place, spans[place], captured.layer(index), None, request, phases)
            scores.append(_scores(layer))
        counts = allocate("global", scores, request.budget, floor=settings.floor)
        return compact_on_policy(self, request, spans, turns, counts, phases)

    def check_engine(self, engine: Engine) -> None:
        super().check_engine(engine)
        shares = self._shares()
        if shares is not None:
            check_shares(shares, [engine.geometry.kv_heads] * len(engine.geometry.full_layers))

    def _queries(self, request: CompactionRequest, report: Report) -> ReferenceQueries:
        """Gather the reference queries; the prefill's own where others have no room and were not asked for."""
        try:
            return self._queries_of(self.settings.query_kinds, request)
        except ContextLengthError as error:
            if "queries" in self.settings.model_fields_set or self.settings.query_kinds == ["context_prefill"]:
                raise
            report.warnings.append(f"the prefill's own queries were used, which keep less: {error}")
            return self._queries_of(["context_prefill"], request)

    def _queries_of(self, kinds: Sequence[str], request: CompactionRequest) -> ReferenceQueries:
        return reference_queries(
            kinds,
            request.engine,
            request.cache,
            request.start,
            request.end,
            request.seed,
            request.progress,
            self._study(request),
        )

    @property
    def takes_focus(self) -> bool:
        return "self_study" in self.settings.query_kinds

    def _study(self, request: CompactionRequest) -> Study:
        return Study(self.settings.study_prompts, self.settings.study_tokens, focus=request.focus)

    def _shares(self) -> list[list[float]] | None:
        path = self.settings.budgets_file if self.settings.budgets == "file" else None
        return None if path is None else read_shares(path)

    def score_layer(
        self,
        place: int,
        span: Span,
        queries: Tensor,
        counts: Sequence[int] | None,
        request: CompactionRequest,
        phases: Phases,
    ) -> list[ScoredHeads]:
        """Score the entries of a layer; counts: how many its heads will keep, where that is known."""
        index = request.cache.full_layers[place][0]
        what = "scores" if self.settings.budgets == "global" and counts is None else "layers"
        self._tell(request, what, place, len(request.cache.full_layers))
        shortlisted = max(math.ceil(self.settings.shortlist * request.budget), *(counts or [0]), 0)
        with phases.phase("key selection"):
            groups = [self._with_subset(group, index, request) for group in head_groups(span, queries)]
            return [ScoredHeads(group, self._score(group, index, shortlisted, request)) for group in groups]

    def _with_subset(self, group: HeadGroup, layer: int, request: CompactionRequest) -> HeadGroup:
        """Leave a group the queries that the settings name."""
        if self.settings.query_subset == "all":
            return group
        generator = _generator(request.seed, layer, group.heads[0])
        kept = select_queries(
            self.settings.query_subset, group.queries.float(), self.settings.subset_queries, generator
        )
        return HeadGroup(group.heads, group.keys, group.values, group.bias, group.positions, kept)

    def _score(self, group: HeadGroup, layer: int, shortlisted: int, request: CompactionRequest) -> ScoredKeys:
        """Score a group's entries by the queries, all of them or a shortlist."""
        n, settings, scaling = group.keys.shape[1], self.settings, request.engine.geometry.scaling
        if n == 0:  # a compacted head may have kept nothing of this part of the document
            return ScoredKeys.nothing(len(group.heads), group.keys)
        if settings.keys != "two_pass" or shortlisted >= n:
            wanted = group.values if settings.values == "least_squares" else None
            with_mass = settings.bias == "redistribute"
            return score_all_keys(group.queries, group.keys, group.bias, scaling, wanted, settings.score, with_mass)
        rows = torch.stack([self._first_pass_rows(group, head, layer, request.seed) for head in group.heads])
        return score_shortlist(
            group.queries,
            gather_rows(group.queries, rows.to(group.queries.device)),
            group.keys,
            group.bias,
            scaling,
            shortlisted,
            settings.score,
            count_rest=request.cache.is_compacted if settings.count_rest is None else settings.count_rest,
        )

    def _fit_layer(
        self, layer: Sequence[ScoredHeads], counts: Sequence[int], request: CompactionRequest, phases: Phases
    ) -> Span:
        """Select `counts` entries of each head of a layer and give them biases and values."""
        heads: list[Heads] = []
        for part in layer:
            wanted = [counts[head] for head in part.group.heads]
            alike = len(set(wanted)) == 1
            slices = [slice(0, len(wanted))] if alike else [slice(h, h + 1) for h in range(len(wanted))]
            for rows in slices:
                heads.extend(zip(*self._fit_heads(part, rows, wanted[rows.start], request, phases), strict=True))
        return Span.from_heads(heads).to(dtype=layer[0].group.keys.dtype)

    def _fit_heads(
        self, part: ScoredHeads, rows: slice, count: int, request: CompactionRequest, phases: Phases
    ) -> Heads:
        """Return `count` entries for each of these heads of a group."""
        group, settings, scaling = part.group, self.settings, request.engine.geometry.scaling
        n = group.keys.shape[1]
        if count >= n:
            return group.keys[rows], group.values[rows], group.bias[rows], group.positions[rows]
        queries = group.queries[rows].float()
        with phases.phase("key selection"):
            full = self._full_statistics(part, rows, scaling) if settings.fits else None
            chosen, found = self._choose(part, rows, count, queries, full, request)
            keys, values, bias, positions = (
                gather_rows(t[rows], chosen) for t in (group.keys, group.values, group.bias, group.positions)
            )
        with phases.phase("bias"):
            bias = self._bias(part, rows, chosen, queries, keys.float(), bias, found, full, scaling)
        with phases.phase("values"):
            if settings.values == "least_squares" and full is not None and full.output is not None:
                values = fit_values(queries, keys.float(), values.float(), bias, scaling, full.output, settings.ridge)
        return keys, values, bias, positions

    def _choose(
        self,
        part: ScoredHeads,
        rows: slice,
        count: int,
        queries: Tensor,
        full: AttentionStatistics | None,
        request: CompactionRequest,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the chosen entries of these heads (heads, count), and OMP's log-weights of them, or None."""
        group, scored = part.group, part.scored
        if self.settings.keys == "omp" and full is not None:
            return matching_pursuit(
                queries,
                group.keys[rows].float(),
                group.bias[rows].float(),
                request.engine.geometry.scaling,
                full.row_maximum,
                (full.log_normalizer - full.row_maximum).exp(),
                count,
                mode=self.settings.omp,
                seed=request.seed % 2**63,
            )
        return gather_rows(scored.candidates[rows], top_entries(scored.score[rows], count)), None

    def _bias(
        self,
        part: ScoredHeads,
        rows: slice,
        chosen: Tensor,
        queries: Tensor,
        keys: Tensor,
        bias: Tensor,
        found: Tensor | None,
        full: AttentionStatistics | None,
        scaling: float,
    ) -> Tensor:
        """Return the new biases of the chosen entries, whose biases so far are `bias`."""
        lower, upper = bias_bounds(part.group.keys.shape[1], chosen.shape[1])
        if self.settings.bias == "none":
            return bias
        if self.settings.bias == "redistribute":
            scored = part.scored
            places = torch.searchsorted(scored.candidates[rows].contiguous(), chosen)
            return redistribute(gather_rows(scored.mass[rows], places), scored.total_mass[rows], bias, lower, upper)
        if found is not None:
            return bias + found
        if full is None:
            return bias
        return fit_bias(
            queries, keys, bias, scaling, full.log_normalizer, full.row_maximum, lower, upper, self.settings.nnls
        )

    def _full_statistics(self, part: ScoredHeads, rows: slice, scaling: float) -> AttentionStatistics:
        """Statistics over all keys of these heads: the scoring's own, or made now where it saw a shortlist only."""
        if part.scored.full is not None:
            return part.scored.full.of_heads(rows)
        group = part.group
        wanted = group.values[rows] if self.settings.values == "least_squares" else None
        return attention_statistics(
            group.queries[rows], group.keys[rows], group.bias[rows], scaling, wanted, with_mass=False
        )

    def _first_pass_rows(self, group: HeadGroup, head: int, layer: int, seed: int) -> Tensor:
        return random_rows(group.queries.shape[1], self.settings.first_pass_queries, _generator(seed, layer, head))

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


def counts_by_length(
    kind: BudgetKind, spans: Sequence[Span], budget: int, shares: list[list[float]] | None
) -> list[list[int]] | None:
    """Entries of each head of each layer, of a kind that goes by how many there are alone; None for "adakv"."""
    if kind == "adakv":
        return None
    return allocate(kind, [[bias for _, _, bias, _ in span] for span in spans], budget, shares)


def _scores(layer: Sequence[ScoredHeads]) -> list[Tensor]:
    """The scores of each head of a layer."""
    return [head for part in layer for head in part.scored.score]


def _generator(seed: int, layer: int, head: int) -> torch.Generator:
    return torch.Generator().manual_seed(((seed * 1_000_003 + layer) * 1_009 + head) % 2**63)
