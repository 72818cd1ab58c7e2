"""Least squares through the Gram matrix: float64, Cholesky, always with a ridge."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

_THREADS = threading.RLock()
_STRIPS, _STRIP_WIDTH = 8, 128


@contextmanager
def one_thread() -> Iterator[None]:
    """Run small factorisations on one thread: with contended threads they are many times slower.

    The number of threads is the process's, so one caller at a time changes it and puts it back.
    """
    with _THREADS:
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)


def add_gram(gram: Tensor, columns: Tensor) -> None:
    """Add columnsᵀ columns to the upper triangle of `gram`, strip by strip: (n, n) and (m, n).

    What is below the diagonal is undefined until `mirror`. About half the work of the whole product.
    """
    n = columns.shape[1]
    count = min(_STRIPS, max(1, n // _STRIP_WIDTH))
    for begin, end in pairwise(n * strip // count for strip in range(count + 1)):
        gram[begin:end, begin:].addmm_(columns[:, begin:end].T, columns[:, begin:])


def mirror(gram: Tensor) -> Tensor:
    """Return the symmetric matrix of which `add_gram` made the upper triangle: (..., n, n)."""
    upper = gram.triu()
    return upper + upper.triu(1).mT


def ridge_of(gram: Tensor, ridge: float) -> Tensor:
    """Return `ridge` times the largest absolute row sum of each Gram matrix: (heads, t, t) -> (heads,)."""
    return ridge * gram.abs().sum(dim=-1).amax(dim=-1)


def solve_ridge(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Solve (gram + r I) x = right in float64, r as in `ridge_of`.

    gram: (heads, t, t). right: (heads, t, k). Near-duplicate columns keep the solution small: an unregularised
    solve gives values of 1e5 and more there. A matrix that is still not positive definite gets ten times the ridge.
    """
    gram, right = gram.double(), right.double()
    strength = ridge_of(gram, ridge).clamp(min=torch.finfo(torch.float64).tiny)
    with one_thread():
        for _ in range(12):
            shifted = gram + strength[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            factor, info = torch.linalg.cholesky_ex(shifted)
            if not bool(info.any()):
                solution: Tensor = torch.cholesky_solve(right, factor)
                return solution
            strength = torch.where(info > 0, strength * 10, strength)
    least: Tensor = torch.linalg.lstsq(gram, right).solution
    return least
