"""The mass matrix of attention, exp(score - row maximum), by its Gram matrix and by the lengths of its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.fitting.attention_statistics import BLOCK_ELEMENTS
from agentcompact.fitting.normal_equations import add_gram, mirror

_SMALL = 1 << 27
"""Multiplications for a Gram matrix up to which it is made in float64."""


def mass_equations(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, top: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return AᵀA (heads, n, n) and Aᵀy (heads, n, float64), A the columns exp(score - top) and y the target.

    In float32, or float64 where that is quick.
    """
    heads, m, _ = queries.shape
    n = keys.shape[1]
    kind = torch.float64 if m * n * n <= _SMALL else torch.float32
    gram = keys.new_zeros(heads, n, n, dtype=kind)
    right = keys.new_zeros(heads, n, dtype=torch.float64)
    size = max(256, 4 * BLOCK_ELEMENTS // n)
    for head in range(heads):
        for start in range(0, m, size):
            block = slice(start, start + size)
            columns = _columns(
                *(t[head].to(kind) for t in (queries[:, block], keys, bias, top[:, block])), scaling=scaling
            )
            right[head] += (target[head, block].to(kind) @ columns).double()
            add_gram(gram[head], columns)
        gram[head] = mirror(gram[head])
    return gram, right


def column_lengths(queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, top: Tensor) -> Tensor:
    """Return the square of the length of each column of the mass matrix: (heads, n)."""
    lengths = torch.zeros_like(bias)
    size = max(1, BLOCK_ELEMENTS // keys.shape[1])
    for head in range(len(keys)):
        for start in range(0, queries.shape[1], size):
            block = slice(start, start + size)
            columns = _columns(queries[head, block], keys[head], bias[head], top[head, block], scaling=scaling)
            lengths[head] += columns.square_().sum(dim=0)
    return lengths


def _columns(queries: Tensor, keys: Tensor, bias: Tensor, top: Tensor, *, scaling: float) -> Tensor:
    """Return exp(score - top) of one head: (m, d), (n, d), (n,) and (m,) -> (m, n)."""
    return torch.addmm(bias[None], queries, keys.T, alpha=scaling).sub_(top[:, None]).exp_()
