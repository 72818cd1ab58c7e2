"""Fitting the biases and the values of selected keys to what all keys gave."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentcompact.fitting.attention_statistics import BLOCK_ELEMENTS
from agentcompact.fitting.nnls import nnls_converged, nnls_published
from agentcompact.fitting.normal_equations import solve_ridge


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
    heads, t, _ = keys.shape
    gram = keys.new_zeros(heads, t, t, dtype=torch.float64)
    right = values.new_zeros(heads, t, values.shape[-1], dtype=torch.float64)
    for rows in _row_blocks(queries.shape[1], heads * t):
        weights = _scores(queries[:, rows], keys, bias, scaling).softmax(dim=2)
        gram += weights.transpose(1, 2) @ weights
        right += weights.transpose(1, 2) @ (output[:, rows] - weights @ values)
    return values + solve_ridge(gram, right, ridge).to(values.dtype)


def _mass_equations(
    queries: Tensor, keys: Tensor, bias: Tensor, scaling: float, log_normalizer: Tensor, row_maximum: Tensor
) -> tuple[Tensor, Tensor]:
    """Return AᵀA (heads, t, t) and Aᵀy (heads, t) of the mass regression, in float64."""
    heads, t, _ = keys.shape
    gram = keys.new_zeros(heads, t, t, dtype=torch.float64)
    right = keys.new_zeros(heads, t, dtype=torch.float64)
    for rows in _row_blocks(queries.shape[1], heads * t):
        top = row_maximum[:, rows, None]
        columns = _scores(queries[:, rows], keys, bias, scaling).sub_(top).exp_()
        target = (log_normalizer[:, rows, None] - top).exp()
        gram += columns.transpose(1, 2) @ columns
        right += (columns.transpose(1, 2) @ target)[..., 0]
    return gram, right


def _scores(queries: Tensor, keys: Tensor, bias: Tensor, scaling: float) -> Tensor:
    return torch.baddbmm(bias[:, None], queries, keys.transpose(1, 2), alpha=scaling)


def _row_blocks(rows: int, width: int) -> list[slice]:
    size = max(256, BLOCK_ELEMENTS // max(1, width))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
