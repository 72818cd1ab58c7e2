"""Fitting the biases and the values of selected keys to what all keys gave."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentcompact.fitting.attention_statistics import BLOCK_ELEMENTS
from agentcompact.fitting.nnls import nnls_converged, nnls_published
from agentcompact.fitting.normal_equations import add_gram, mirror, solve_ridge


def fit_bias(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor,
    scaling: float,
    log_normalizer: Tensor,
    row_maximum: Tensor,
    lower: float,
    upper: float,
    mode: Literal["published", "converged"] = "published",
) -> Tensor:
    """Fit biases so that the selected keys carry the attention mass of all keys; return them (heads, t).

    queries: (heads, m, d). keys: (heads, t, d), selected. bias: (heads, t), so far. log_normalizer, row_maximum:
    (heads, m), of all keys. The weights regress exp(log_normalizer - row_maximum), which is the row sum of all
    keys, on exp(score + bias - row_maximum); lower and upper bound the addition to the bias.
    Source: attention matching, NNLS on attention mass.
    """
    gram, right = _mass_equations(queries, keys, bias, scaling, log_normalizer, row_maximum)
    solve = nnls_published if mode == "published" else nnls_converged
    low, high = float(torch.tensor(lower).exp()), float(torch.tensor(upper).exp())
    weights = solve(gram, right, low, high)
    return bias + weights.log().to(bias.dtype)


def fit_values(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scaling: float,
    output: Tensor,
    ridge: float = 1e-6,
) -> Tensor:
    """Fit values so that softmax(score + bias) values gives `output`; return them (heads, t, dv).

    values: (heads, t, dv), the original ones, to which the ridge pulls: on the fitted queries the result is never
    worse than they are. output: (heads, m, dv), of all keys. Source: attention matching, least squares for C_v.
    """
    gram = _Gram(keys)
    right = torch.zeros_like(values, dtype=torch.float64)
    for rows in _row_blocks(queries.shape[1], values.shape[0] * values.shape[1]):
        weights = _scores(queries[:, rows], keys, bias, scaling).softmax(dim=2)
        gram.add(weights)
        right += weights.mT @ (output[:, rows] - weights @ values)
    return values + solve_ridge(gram.whole(), right, ridge).to(values.dtype)


def _mass_equations(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, log_normalizer: Tensor, row_maximum: Tensor
) -> tuple[Tensor, Tensor]:
    """Return AᵀA (heads, t, t) and Aᵀy (heads, t) of the mass regression, in float64."""
    gram = _Gram(keys)
    right = torch.zeros_like(bias, dtype=torch.float64)
    for rows in _row_blocks(queries.shape[1], bias.numel()):
        top = row_maximum[:, rows, None]
        columns = _scores(queries[:, rows], keys, bias, scaling).sub_(top).exp_()
        target = (log_normalizer[:, rows, None] - top).exp()
        gram.add(columns)
        right += (columns.mT @ target)[..., 0]
    return gram.whole(), right


class _Gram:
    """The Gram matrices of some heads, summed over blocks of rows in float32, and those sums in float64."""

    def __init__(self, keys: Tensor) -> None:
        heads, t, _ = keys.shape
        self._sum = keys.new_zeros(heads, t, t, dtype=torch.float64)
        self._block = keys.new_empty(heads, t, t)

    def add(self, columns: Tensor) -> None:
        """Add columns (heads, rows, t)."""
        self._block.zero_()
        for head in range(len(columns)):
            add_gram(self._block[head], columns[head])
        self._sum += self._block

    def whole(self) -> Tensor:
        """Return the matrices (heads, t, t) in float64."""
        return mirror(self._sum)


def _scores(queries: Tensor, keys: Tensor, bias: Tensor, scaling: float) -> Tensor:
    return torch.baddbmm(bias[:, None], queries, keys.transpose(1, 2), alpha=scaling)


def _row_blocks(rows: int, width: int) -> list[slice]:
    size = max(256, BLOCK_ELEMENTS // max(1, width))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
