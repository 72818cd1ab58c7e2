"""The Gram matrix of attention masses, and the bounded least squares on it, against numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from omp_reference import SCALING, columns_of, optimize, problem

from agentcompact.fitting import mass_equations as equations
from agentcompact.fitting.bounded import bounded_least_squares
from agentcompact.fitting.mass_equations import column_lengths, mass_equations

LOWER, UPPER = 1e-12, math.exp(7)


@pytest.mark.parametrize("small", [1 << 40, 0])
def test_equations_from_strips_and_blocks(monkeypatch, small):
    monkeypatch.setattr(equations, "_SMALL", small)
    monkeypatch.setattr(equations, "BLOCK_ELEMENTS", 1)
    given = problem(m=600, n=21)
    gram, right = mass_equations(*given[:3], SCALING, *given[3:])
    assert gram.dtype == (torch.float64 if small else torch.float32)
    for h, (a, y) in enumerate(columns_of(given)):
        np.testing.assert_allclose(gram[h].numpy(), a.T @ a, rtol=1e-4)
        np.testing.assert_allclose(right[h].numpy(), a.T @ y, rtol=1e-4)
    lengths = column_lengths(*given[:3], SCALING, given[3])
    for h, (a, _) in enumerate(columns_of(given)):
        np.testing.assert_allclose(lengths[h].numpy(), (a**2).sum(axis=0), rtol=1e-4)


@pytest.mark.parametrize(("low", "high"), [(LOWER, UPPER), (0.5, 1.5), (1.0, 1.2)])
def test_bounded_least_squares_equals_scipy(low, high):
    rng = np.random.default_rng(0)
    for k in (1, 2, 7, 20):
        for start in (low, 1.0, high):
            a = rng.random((40, k)) ** 2
            y = a @ rng.normal(1, 1, size=k) + 0.1 * rng.normal(size=40)
            expected = optimize.lsq_linear(a, y, bounds=(low, high), method="bvls", tol=1e-14).x
            given = [torch.from_numpy(each) for each in (a.T @ a, a.T @ y, np.full(k, start))]
            np.testing.assert_allclose(bounded_least_squares(*given, low, high).numpy(), expected, atol=1e-6)


def test_bounded_least_squares_of_copied_columns_is_finite():
    rng = np.random.default_rng(1)
    a = np.repeat(rng.random((40, 5)), 3, axis=1)
    y = a @ np.ones(15)
    found = bounded_least_squares(*(torch.from_numpy(each) for each in (a.T @ a, a.T @ y, np.zeros(15))), LOWER, UPPER)
    np.testing.assert_allclose(a @ found.numpy(), y, rtol=1e-4)
