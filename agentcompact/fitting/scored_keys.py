"""Scoring the keys of some heads: all by all queries, or a shortlist that a few queries chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.fitting.attention_statistics import AttentionStatistics, Score, attention_statistics
from agentcompact.fitting.selection import gather_rows, top_entries


@dataclass(frozen=True)
class ScoredKeys:
    """Keys with the scores that selection goes by.

    candidates: (heads, c) into the keys. score, mass: (heads, c), of the candidates; total_mass: (heads,), the mean
    mass that a selection must carry. full: statistics of all keys under all queries, where scoring made them.
    """

    candidates: Tensor
    score: Tensor
    mass: Tensor
    total_mass: Tensor
    full: AttentionStatistics | None

    @classmethod
    def nothing(cls, heads: int, like: Tensor) -> ScoredKeys:
        """Heads without keys."""
        empty = like.new_empty(heads, 0, dtype=torch.float32)
        return cls(empty.long(), empty, empty, empty.sum(dim=1), None)


def score_all_keys(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, values: Tensor | None, score: Score, with_mass: bool
) -> ScoredKeys:
    """Score every key by every query: (heads, m, d), (heads, n, d), (heads, n), values (heads, n, dv) or None.

    with_mass: whether the keys' mass is wanted; zeros otherwise.
    """
    full = attention_statistics(queries, keys, bias, scaling, values, score=score, with_mass=with_mass)
    candidates = torch.arange(keys.shape[1], device=keys.device).expand(keys.shape[0], -1)
    return ScoredKeys(candidates, full.score, full.mass, full.mass.sum(dim=1), full)


def score_shortlist(
    queries: Tensor,
    sample: Tensor,
    keys: Tensor,
    bias: Tensor,
    scaling: float,
    count: int,
    score: Score,
    *,
    count_rest: bool,
) -> ScoredKeys:
    """Let a sample of the queries choose `count` keys of each head, and score those by all queries.

    queries: (heads, m, d). sample: (heads, s, d). count_rest: whether the mass off the shortlist, as the sample saw it,
    is part of the total. Source: the write-up "Compaction", two-pass selection.
    """
    first = attention_statistics(sample, keys, bias, scaling, score=score)
    candidates = top_entries(first.score, count)
    second = attention_statistics(
        queries, gather_rows(keys, candidates), gather_rows(bias, candidates), scaling, score=score
    )
    total = second.mass.sum(dim=1)
    if count_rest:
        seen = gather_rows(first.mass, candidates).sum(dim=1)
        total = total * first.mass.sum(dim=1) / seen.clamp(min=torch.finfo(seen.dtype).tiny)
    return ScoredKeys(candidates, second.score, second.mass, total, None)
