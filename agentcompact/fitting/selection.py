"""Choosing entries by their scores."""

from __future__ import annotations

import torch
from torch import Tensor


def top_entries(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores of each head, in ascending order: (heads, n) -> (heads, count).

    Of equal scores the earlier entry wins, so the choice does not depend on the device or on the count of threads.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[:, :count].sort(dim=-1).values


def gather_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """Pick rows of each head: (heads, n, ...) and (heads, t) -> (heads, t, ...)."""
    head = torch.arange(rows.shape[0], device=rows.device)[:, None]
    return rows[head, indices]


def random_rows(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` different row numbers below `total` in ascending order (all of them where count >= total)."""
    if count >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=generator)[:count].sort().values
