"""Least squares with bounds, solved to convergence by an active set: quick where the last solution is known."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.fitting.normal_equations import solve_ridge


def bounded_least_squares(
    gram: Tensor, right: Tensor, start: Tensor, lower: float, upper: float, ridge: float = 1e-10
) -> Tensor:
    """Minimise ½ wᵀ gram w - rightᵀ w over lower <= w <= upper; return w (k,), float64.

    gram: (k, k). right, start: (k,); start says which bounds hold at first. Columns are scaled to length 1, and the
    ridge is relative to that.
    Source: Stark and Parker, Bounded-Variable Least-Squares (1995), on the normal equations.
    """
    gram, right = gram.double(), right.double()
    scale = gram.diagonal().clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
    gram, right = gram * scale[:, None] * scale, right * scale
    low, high = lower / scale, upper / scale
    x = (start.double() / scale).clamp(low, high)
    free = (x > low) & (x < high)
    goal = 1e-9 * right.abs().amax()
    for _ in range(3 * len(x) + 20):
        if not _descend(gram, right, x, free, low, high, ridge):
            continue  # a bound was hit on the way, and fewer are free now
        slope = right - gram @ x
        held = torch.where(x <= low, slope, -slope).masked_fill(free, -torch.inf)
        worst = int(held.argmax())
        if not float(held[worst]) > float(goal):
            break
        free[worst] = True
    return (x * scale).clamp(lower, upper)


def _descend(gram: Tensor, right: Tensor, x: Tensor, free: Tensor, low: Tensor, high: Tensor, ridge: float) -> bool:
    """Move the free variables of x to their minimum, or up to the first bound; return whether they reached it."""
    rows = free.nonzero()[:, 0]
    if not len(rows):
        return True
    held = right[rows] - gram[rows] @ x.masked_fill(free, 0)
    inner = gram[rows[:, None], rows]
    strength = ridge / float(inner.abs().sum(dim=1).amax())  # `solve_ridge` takes it relative to the row sums
    goal = solve_ridge(inner[None], held[None, :, None], strength)[0, :, 0]
    move = goal - x[rows]
    room = torch.where(move > 0, high[rows], low[rows]) - x[rows]
    beyond = (goal < low[rows]) | (goal > high[rows])
    if not bool(beyond.any()):
        x[rows] = goal
        return True
    share = torch.where(beyond, room / move, torch.inf)
    step = float(share.amin().clamp(min=0, max=1))
    stuck = beyond & (share <= step)
    moved = x[rows] + step * move
    x[rows] = torch.where(stuck, torch.where(move > 0, high[rows], low[rows]), moved)
    free[rows[stuck]] = False
    return False
