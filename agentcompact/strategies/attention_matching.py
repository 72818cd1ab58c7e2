"""Attention matching: select keys, bias them to carry the mass of all keys, and keep or fit their values.

Each named strategy is a choice for the three steps; the steps themselves are in `agentcompact.fitting`.
Sources: Fast KV Compaction via Attention Matching (Zweiger et al. 2026); the write-up "Compaction" (two-pass
selection, uniform redistribution, direct values).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agentcompact.fitting.attention_statistics import AttentionStatistics, attention_statistics
from agentcompact.fitting.fit import fit_bias, fit_values
from agentcompact.fitting.redistribution import redistribute
from agentcompact.fitting.selection import gather_rows, random_rows, top_entries
from agentcompact.strategies.base import CompactionRequest, HeadGroup, LayerwiseStrategy, Phases, StrategySettings

BIAS_LIMIT = 3.0
"""A fitted bias moves an entry's weight by at most this factor's logarithm, as published (but see `bias_bounds`)."""


class AttentionMatchingSettings(StrategySettings):
    """The three steps of attention matching, and what each needs."""

    keys: Literal["highest_attention", "two_pass"] = Field(
        "highest_attention", description="score all keys by all queries, or a shortlist only"
    )
    score: Literal["rms", "mean", "max"] = Field("rms", description="how a key's weights over the queries are summed up")
    bias: Literal["nnls", "redistribute", "none"] = Field("nnls", description="how the entries get their biases")
    values: Literal["least_squares", "direct"] = Field("least_squares", description="fitted or original values")
    nnls: Literal["published", "converged"] = Field("published", description="mode of the NNLS fit")
    ridge: float = Field(1e-6, gt=0, allow_inf_nan=False, description="ridge, relative to the Gram matrix's row sums")
    first_pass_queries: int = Field(256, ge=1, description="two_pass: random queries that score all keys")
    shortlist: float = Field(5.0, ge=1, allow_inf_nan=False, description="two_pass: keys on the shortlist per entry kept")
    count_rest: bool | None = Field(
        None, description="two_pass: add the mass off the shortlist, as the first pass saw it; default: if compacted before"
    )


@dataclass(frozen=True)
class Selection:
    """Selected keys of a group of heads.

    indices: (heads, t) into the group's entries. mass: (heads, t), their mean mass; total_mass: (heads,), what they
    must carry. everything: statistics of all keys under all queries, where the selection computed them.
    """

    indices: Tensor
    mass: Tensor
    total_mass: Tensor
    everything: AttentionStatistics | None


class AttentionMatching(LayerwiseStrategy):
    """Base of the named presets; not registered under a name of its own."""

    settings_type = AttentionMatchingSettings
    settings: AttentionMatchingSettings

    def compact_heads(
        self, group: HeadGroup, layer: int, request: CompactionRequest, phases: Phases
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scaling = request.engine.geometry.scaling
        with phases.phase("key selection"):
            selection = self._select(group, layer, request, scaling)
        keys, values, bias, positions = (
            gather_rows(rows, selection.indices) for rows in (group.keys, group.values, group.bias, group.positions)
        )
        lower, upper = bias_bounds(group.keys.shape[1], request.budget)
        with phases.phase("bias"):
            if self.settings.bias == "redistribute":
                bias = redistribute(selection.mass, selection.total_mass, bias, lower, upper)
            elif self.settings.bias == "nnls":
                full = self._everything(group, selection, scaling)
                bias = fit_bias(
                    group.queries.float(), keys.float(), bias, scaling, full.log_normalizer, full.row_maximum,
                    lower, upper, self.settings.nnls,
                )  # fmt: skip
        with phases.phase("values"):
            if self.settings.values == "least_squares":
                full = self._everything(group, selection, scaling)
                output = full.output if full.output is not None else values[:, :0]
                values = fit_values(
                    group.queries.float(), keys.float(), values.float(), bias, scaling, output, self.settings.ridge
                )
        return keys, values, bias, positions

    def _select(self, group: HeadGroup, layer: int, request: CompactionRequest, scaling: float) -> Selection:
        heads, n, _ = group.keys.shape
        shortlisted = math.ceil(self.settings.shortlist * request.budget)
        if self.settings.keys == "highest_attention" or shortlisted >= n:
            wanted = group.values if self.settings.values == "least_squares" else None
            full = attention_statistics(group.queries, group.keys, group.bias, scaling, wanted)
            indices = top_entries(self._score(full), request.budget)
            return Selection(indices, gather_rows(full.mass, indices), full.mass.sum(dim=1), full)
        rows = torch.stack([self._first_pass_rows(group, head, layer, request.seed) for head in group.heads])
        sample = gather_rows(group.queries, rows.to(group.queries.device))
        first = attention_statistics(sample, group.keys, group.bias, scaling)
        candidates = top_entries(self._score(first), shortlisted)
        second = attention_statistics(
            group.queries, gather_rows(group.keys, candidates), gather_rows(group.bias, candidates), scaling
        )
        chosen = top_entries(self._score(second), request.budget)
        total = second.mass.sum(dim=1)
        if request.cache.is_compacted if self.settings.count_rest is None else self.settings.count_rest:
            seen = gather_rows(first.mass, candidates).sum(dim=1)
            total = total * first.mass.sum(dim=1) / seen.clamp(min=torch.finfo(seen.dtype).tiny)
        return Selection(gather_rows(candidates, chosen), gather_rows(second.mass, chosen), total, None)

    def _score(self, statistics: AttentionStatistics) -> Tensor:
        return {"rms": statistics.rms, "mean": statistics.mean, "max": statistics.highest}[self.settings.score]

    def _first_pass_rows(self, group: HeadGroup, head: int, layer: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) * 1_009 + head)
        return random_rows(group.queries.shape[1], self.settings.first_pass_queries, generator)

    def _everything(self, group: HeadGroup, selection: Selection, scaling: float) -> AttentionStatistics:
        """Statistics over all keys: the selection's own, or a full scoring where it had none."""
        if selection.everything is not None and selection.everything.output is not None:
            return selection.everything
        if selection.everything is not None and self.settings.values == "direct":
            return selection.everything
        return attention_statistics(group.queries, group.keys, group.bias, scaling, group.values)


def bias_bounds(entries: int, budget: int) -> tuple[float, float]:
    """Return the least and the most that may be added to an entry's bias when `entries` become `budget`.

    -3 and 3 as published; at q = 0 the mean weight must reach entries / budget, so beyond that ratio of e^3 the upper
    bound grows to twice it.
    """
    return -BIAS_LIMIT, max(BIAS_LIMIT, math.log(2 * entries / budget))
