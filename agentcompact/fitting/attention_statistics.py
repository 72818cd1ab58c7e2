"""One pass over the attention of many queries to many keys, in blocks that fit a processor's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20
"""Scores held at a time (4 MB in float32)."""


@dataclass(frozen=True)
class AttentionStatistics:
    """What queries (heads, m, d) read from keys (heads, n, d).

    rms, mean, highest: (heads, n), each key's softmax weight over the queries by root mean square, mean, maximum.
    mass: (heads, n), the mean unnormalised weight exp(score - log_scale) of each key.
    log_scale: (heads,), the one maximum per head that was subtracted, so masses of all queries share a scale.
    log_normalizer: (heads, m). row_maximum: (heads, m), the highest score of each query. output: (heads, m, value_dim), where values were given.
    """

    rms: Tensor
    mean: Tensor
    highest: Tensor
    mass: Tensor
    log_scale: Tensor
    log_normalizer: Tensor
    row_maximum: Tensor
    output: Tensor | None


def attention_statistics(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, values: Tensor | None = None
) -> AttentionStatistics:
    """Softmax over the n keys, without a causal mask, for every query.

    queries: (heads, m, d). keys: (heads, n, d). bias: (heads, n), added to the scaled scores. values: (heads, n, dv)
    or None. Everything is computed in float32.
    """
    queries, keys, bias = queries.float(), keys.float(), bias.float()
    if values is not None:
        values = values.float()
    if queries.device.type != "cpu" or queries.shape[0] == 1:
        return _statistics(queries, keys, bias, scaling, values)
    # One head at a time keeps each product whole and its block in the cache; a batched one is split by head.
    parts = [
        _statistics(queries[h : h + 1], keys[h : h + 1], bias[h : h + 1], scaling, None if values is None else values[h : h + 1])
        for h in range(queries.shape[0])
    ]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("rms", "mean", "highest", "mass", "log_scale", "log_normalizer", "row_maximum")
    }
    output = None if values is None else torch.cat([part.output for part in parts if part.output is not None])
    return AttentionStatistics(**joined, output=output)


def _statistics(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, values: Tensor | None
) -> AttentionStatistics:
    heads, m, _ = queries.shape
    n = keys.shape[1]
    squares, sums, highest, mass = (queries.new_zeros(heads, n) for _ in range(4))
    log_scale = queries.new_full((heads,), float("-inf"))
    log_normalizer, row_maximum = queries.new_empty(heads, m), queries.new_empty(heads, m)
    output = None if values is None else queries.new_empty(heads, m, values.shape[-1])
    transposed, bias_row = keys.transpose(1, 2), bias[:, None]
    rows = max(1, BLOCK_ELEMENTS // (heads * n))
    for start in range(0, m, rows):
        block = slice(start, min(start + rows, m))
        scores = torch.baddbmm(bias_row, queries[:, block], transposed, alpha=scaling)
        top = scores.amax(dim=2, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=2, keepdim=True)
        row_maximum[:, block] = top[..., 0]
        log_normalizer[:, block] = (top + total.log())[..., 0]
        if values is not None and output is not None:
            output[:, block] = (weights @ values) / total
        scale = torch.maximum(log_scale, top.amax(dim=1)[:, 0])
        mass.mul_((log_scale - scale).exp()[:, None])
        per_query = torch.cat([(top - scale[:, None, None]).exp(), 1 / total], dim=2).transpose(1, 2)
        columns = per_query @ weights
        mass += columns[:, 0]
        sums += columns[:, 1]
        log_scale = scale
        weights.mul_(per_query[:, 1, :, None])
        torch.maximum(highest, weights.amax(dim=1), out=highest)
        squares += weights.square_().sum(dim=1)
    return AttentionStatistics(
        (squares / m).sqrt(), sums / m, highest, mass / m, log_scale, log_normalizer, row_maximum, output
    )
