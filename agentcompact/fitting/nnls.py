"""Least squares with bounds for the weights e^β of the selected entries, from the Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.fitting.normal_equations import one_thread, solve_ridge


def nnls_published(gram: Tensor, right: Tensor, lower: float, upper: float, ridge: float = 1e-6) -> Tensor:
    """Solve, clamp, and take two projected-gradient steps, as the attention-matching code does.

    gram: (heads, t, t) = AᵀA. right: (heads, t) = Aᵀy. Returns weights (heads, t) in [lower, upper], float64.
    The step is 1/L, L an upper bound of the largest eigenvalue (see `largest_eigenvalue_bound`).
    Source: Fast KV Compaction via Attention Matching (Zweiger et al. 2026), its published implementation.
    """
    gram, right = gram.double(), right.double()
    weights = solve_ridge(gram, right[..., None], ridge)[..., 0].clamp(lower, upper)
    step = 1 / largest_eigenvalue_bound(gram)[:, None]
    for _ in range(2):
        weights = (weights - step * _gradient(gram, right, weights)).clamp(lower, upper)
    return weights


def nnls_converged(
    gram: Tensor, right: Tensor, lower: float, upper: float, *, steps: int = 20_000, tolerance: float = 1e-9
) -> Tensor:
    """Minimise ½ wᵀ gram w - rightᵀ w over the box until the projected gradient vanishes.

    Shapes as in `nnls_published`. Accelerated projected gradient with restarts, on variables scaled by the
    diagonal; `tolerance` is relative to the largest |right|.
    """
    gram, right = gram.double(), right.double()
    scale = gram.diagonal(dim1=1, dim2=2).clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
    gram = gram * scale[:, :, None] * scale[:, None, :]
    right = right * scale
    low, high = lower / scale, upper / scale
    step = 1 / largest_eigenvalue_bound(gram)[:, None]
    weights = solve_ridge(gram, right[..., None], 1e-9)[..., 0].clamp(min=low, max=high)
    ahead, momentum = weights, 1.0
    goal = tolerance * right.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    with one_thread():
        for iteration in range(steps):
            moved = (ahead - step * _gradient(gram, right, ahead)).clamp(min=low, max=high)
            if bool(((ahead - moved) * (moved - weights)).sum() > 0):
                ahead, momentum = weights, 1.0
                continue
            following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            ahead = moved + (momentum - 1) / following * (moved - weights)
            weights, momentum = moved, following
            if iteration % 20 == 0 and bool(_projected_gradient(gram, right, weights, low, high) < goal):
                break
    return weights * scale


def largest_eigenvalue_bound(gram: Tensor, steps: int = 10) -> Tensor:
    """Bound the largest eigenvalue of each non-negative Gram matrix from above: (heads, t, t) -> (heads,).

    Power iteration from ones; for a positive vector x, max (Gx)_i / x_i is an upper bound (Collatz-Wielandt).
    """
    absolute = gram.abs()
    x = absolute.new_ones(absolute.shape[:2])
    ratio = x
    for _ in range(steps):
        product = (absolute @ x[..., None])[..., 0]
        ratio = product / x
        x = (product / product.amax(dim=-1, keepdim=True).clamp(min=1e-300)).clamp(min=1e-30)
    return ratio.amax(dim=-1).clamp(min=torch.finfo(gram.dtype).tiny)


def _gradient(gram: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    return (gram @ weights[..., None])[..., 0] - right


def _projected_gradient(gram: Tensor, right: Tensor, weights: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Largest component of the gradient that does not push against a bound."""
    gradient = _gradient(gram, right, weights)
    free = ((weights > low) | (gradient < 0)) & ((weights < high) | (gradient > 0))
    return (gradient * free).abs().amax()
