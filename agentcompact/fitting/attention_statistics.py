"""One pass over the attention of many queries to many keys, in blocks that fit a processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 21
"""Scores held at a time: 8 MB in float32, small enough for a processor's caches; half of it was a quarter slower."""

Score = Literal["rms", "mean", "max"]


@dataclass(frozen=True)
class AttentionStatistics:
    """What queries (heads, m, d) read from keys (heads, n, d).

    score: (heads, n), each key's softmax weights over the queries by root mean square, mean or maximum.
    mass: (heads, n), the mean unnormalised weight exp(score - log_scale) of each key; zeros where it was not asked for.
    log_scale: (heads,), the one maximum per head that was subtracted, so masses of all queries share a scale.
    log_normalizer: (heads, m). row_maximum: (heads, m), the highest score of each query.
    output: (heads, m, value_dim), where values were given.
    """

    score: Tensor
    mass: Tensor
    log_scale: Tensor
    log_normalizer: Tensor
    row_maximum: Tensor
    output: Tensor | None

    def of_heads(self, rows: slice) -> AttentionStatistics:
        """Return the statistics of some of the heads."""
        return AttentionStatistics(
            self.score[rows],
            self.mass[rows],
            self.log_scale[rows],
            self.log_normalizer[rows],
            self.row_maximum[rows],
            None if self.output is None else self.output[rows],
        )


def attention_statistics(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor,
    scaling: float,
    values: Tensor | None = None,
    *,
    score: Score = "rms",
    with_mass: bool = True,
) -> AttentionStatistics:
    """Softmax over the n keys, without a causal mask, for every query.

    queries: (heads, m, d). keys: (heads, n, d). bias: (heads, n), added to the scaled scores. values: (heads, n, dv)
    or None. with_mass: whether the keys' mass is wanted. Everything is computed in float32.
    """
    inputs = [queries.float(), keys.float(), bias.float()]
    if values is not None:
        inputs.append(values.float())
    if queries.device.type != "cpu":
        return _statistics(*inputs, scaling=scaling, score=score, with_mass=with_mass)
    # One head at a time keeps each product whole and its block in the cache; a batched one is split by head.
    parts = [
        _statistics(*(t[head : head + 1] for t in inputs), scaling=scaling, score=score, with_mass=with_mass)
        for head in range(queries.shape[0])
    ]
    outputs = [part.output for part in parts if part.output is not None]
    return AttentionStatistics(
        torch.cat([part.score for part in parts]),
        torch.cat([part.mass for part in parts]),
        torch.cat([part.log_scale for part in parts]),
        torch.cat([part.log_normalizer for part in parts]),
        torch.cat([part.row_maximum for part in parts]),
        torch.cat(outputs) if outputs else None,
    )


def _statistics(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor,
    values: Tensor | None = None,
    *,
    scaling: float,
    score: Score,
    with_mass: bool,
) -> AttentionStatistics:
    heads, m, _ = queries.shape
    n = keys.shape[1]
    summed, mass = queries.new_zeros(heads, n), queries.new_zeros(heads, n)
    log_scale = queries.new_full((heads,), float("-inf"))
    log_normalizer, row_maximum = queries.new_empty(heads, m), queries.new_empty(heads, m)
    output = None if values is None else queries.new_empty(heads, m, values.shape[-1])
    transposed, bias_row = keys.transpose(1, 2), bias[:, None]
    biased = int(bool(bias.any()))  # without biases the product does not copy them into every row first
    rows = min(m, max(1, BLOCK_ELEMENTS // (heads * n)))
    buffer = queries.new_empty(heads, rows, n)
    for start in range(0, m, rows):
        block = slice(start, min(start + rows, m))
        weights = buffer if block.stop - start == rows else buffer[:, : block.stop - start].contiguous()
        torch.baddbmm(bias_row, queries[:, block], transposed, beta=biased, alpha=scaling, out=weights)
        top = weights.amax(dim=2)
        total = weights.sub_(top[..., None]).exp_().sum(dim=2)
        row_maximum[:, block] = top
        log_normalizer[:, block] = top + total.log()
        if values is not None and output is not None:
            output[:, block] = (weights @ values) / total[..., None]
        if with_mass:
            scale = torch.maximum(log_scale, top.amax(dim=1))
            mass.mul_((log_scale - scale).exp()[:, None])
            mass += _over_queries((top - scale[:, None]).exp(), weights)
            log_scale = scale
        if score == "rms":
            summed += _over_queries(total.square().reciprocal(), weights.square_())
        elif score == "mean":
            summed += _over_queries(total.reciprocal(), weights)
        else:
            torch.maximum(summed, weights.div_(total[..., None]).amax(dim=1), out=summed)
    scores = {"rms": (summed / m).sqrt(), "mean": summed / m, "max": summed}[score]
    return AttentionStatistics(scores, mass / m, log_scale, log_normalizer, row_maximum, output)


def _over_queries(factors: Tensor, weights: Tensor) -> Tensor:
    """Sum factor times weight over the queries: (heads, m) and (heads, m, n) -> (heads, n)."""
    return (factors[:, None] @ weights)[:, 0]


def causal_mean(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """Mean softmax weight of each key over the queries that could see it: (heads, n) in float32.

    A query sees the keys at positions up to its own, and its softmax is over those alone; a key that no query can see
    gets 0. queries: (heads, m, d). keys: (heads, n, d). bias: (heads, n), added to the scaled scores.
    query_positions: (m,). key_positions: (heads, n).
    """
    seen_from, order = query_positions.to(queries.device).sort(stable=True)
    scores = torch.zeros(bias.shape, device=bias.device)
    for head in range(queries.shape[0]):
        places, columns = key_positions[head].to(queries.device, seen_from.dtype).sort(stable=True)
        rows = int((seen_from >= places[0]).sum())
        if not rows:
            continue
        inputs = (queries[head, order[-rows:]].float(), keys[head, columns].float(), bias[head, columns].float())
        summed = torch.zeros(len(places), device=bias.device)
        for _, weights, total in _blocks(*inputs, scaling, (seen_from[-rows:], places)):
            summed[: weights.shape[1]] += total.reciprocal() @ weights
        seeing = len(seen_from) - torch.searchsorted(seen_from, places)
        scores[head, columns] = summed / seeing.clamp(min=1)
    return scores


def weighted_maximum(queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, factors: Tensor) -> Tensor:
    """Highest product of softmax weight and the query's factor, of each key over the queries: (heads, n) in float32.

    queries: (heads, m, d). keys: (heads, n, d). bias: (heads, n), added to the scaled scores. factors: (m,) at least 0.
    """
    factors = factors.to(queries.device).float()
    scores = torch.zeros(bias.shape, device=bias.device)
    for head in range(queries.shape[0]):
        inputs = (queries[head].float(), keys[head].float(), bias[head].float())
        for block, weights, total in _blocks(*inputs, scaling):
            highest = weights.mul_((factors[block] / total)[:, None]).amax(dim=0)
            torch.maximum(scores[head], highest, out=scores[head])
    return scores


def _blocks(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, positions: tuple[Tensor, Tensor] | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield softmax weights times their total, (rows, columns), and the totals (rows,), a block of queries at a time.

    queries: (m, d). keys: (n, d). positions: ascending, of queries (m,) and keys (n,); a query sees the keys that are
    not behind it, at least one, and the columns end with the last key that the block sees. The weights may be changed.
    """
    rows, n = max(1, BLOCK_ELEMENTS // len(keys)), len(keys)
    for start in range(0, len(queries), rows):
        block = slice(start, start + rows)
        ends = None if positions is None else torch.searchsorted(positions[1], positions[0][block], right=True)
        seen = n if ends is None else int(ends[-1])
        weights = torch.addmm(bias[:seen], queries[block], keys[:seen].T, alpha=scaling)
        if ends is not None:
            first = int(ends[0])
            behind = torch.arange(first, seen, device=ends.device) >= ends[:, None]
            weights[:, first:].masked_fill_(behind, float("-inf"))
        weights.sub_(weights.amax(dim=1, keepdim=True)).exp_()
        yield block, weights, weights.sum(dim=1)
