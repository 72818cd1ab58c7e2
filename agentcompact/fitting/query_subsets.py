"""Small subsets of the reference queries, for scoring keys by a few of them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentcompact.fitting.selection import gather_rows, random_rows, top_entries

Subset = Literal["random", "mahalanobis", "extremes", "mean"]

RIDGE = 1e-6
"""Added to the covariance, relative to its mean variance."""


def select_queries(kind: Subset, queries: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` of the queries (heads, m, d), all of them where there are no more, or their mean alone.

    Source: the write-up "Compaction", its ablation of query subsets; Expected Attention (Devoto et al. 2025) for the
    mean.
    """
    if kind == "mean":
        return queries.mean(dim=1, keepdim=True)
    if count >= queries.shape[1]:
        return queries
    if kind == "random":
        return gather_rows(queries, random_subset(queries, count, generator))
    return gather_rows(queries, (mahalanobis_subset if kind == "mahalanobis" else extreme_subset)(queries, count))


def random_subset(queries: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` random rows of each head, ascending: (heads, count)."""
    rows = [random_rows(queries.shape[1], count, generator) for _ in range(queries.shape[0])]
    return torch.stack(rows).to(queries.device)


def mahalanobis_subset(queries: Tensor, count: int) -> Tensor:
    """Return the rows with the largest Mahalanobis distance from the mean, ascending: (heads, count)."""
    centred, covariance = _gaussian(queries)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.transpose(1, 2), upper=False)
    return top_entries(whitened.square().sum(dim=1), count)


def extreme_subset(queries: Tensor, count: int) -> Tensor:
    """Return the most extreme rows along the principal components, ascending: (heads, count), none twice.

    The largest projection on the leading component, the smallest, the same on the next component, and so on; behind
    the last component it goes on with the first. A component points where its largest coordinate is positive.
    """
    centred, covariance = _gaussian(queries)
    components = torch.linalg.eigh(covariance).eigenvectors.flip(2)  # columns, the leading one first
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    projections = (centred @ (components * largest.sign())).transpose(1, 2).contiguous()
    used = torch.zeros_like(projections[:, 0], dtype=torch.bool)
    for turn in range(count):
        along = projections[:, turn // 2 % projections.shape[1]]
        signed = along if turn % 2 == 0 else -along
        used.scatter_(1, signed.masked_fill(used, -torch.inf).argmax(dim=1, keepdim=True), True)
    return used.nonzero()[:, 1].reshape(len(queries), -1)


def _gaussian(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries less their mean, and their covariance (heads, d, d) with a ridge, in float64."""
    centred = queries.double() - queries.double().mean(dim=1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred / queries.shape[1]
    variance = covariance.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    identity = torch.eye(queries.shape[2], dtype=covariance.dtype, device=covariance.device)
    return centred, covariance + RIDGE * variance[:, None, None] * identity
