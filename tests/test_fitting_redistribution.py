"""Uniform redistribution against the write-up's formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentcompact.fitting.redistribution import redistribute

LOWER, UPPER = -3.0, 4.0


def problem(heads=4, t=7, seed=0, spread=0.5):
    g = torch.Generator().manual_seed(seed)
    mass = torch.exp(spread * torch.randn(heads, t, generator=g))
    total = mass.sum(dim=1) * (1 + 3 * torch.rand(heads, generator=g))
    return mass, total, torch.randn(heads, t, generator=g)


def formula(mass, total, bias):
    """bias_j + log((m_j + missing / t) / m_j), entry by entry."""
    heads, t = mass.shape
    new = np.zeros((heads, t))
    for h in range(heads):
        missing = float(total[h]) - sum(float(m) for m in mass[h])
        for j in range(t):
            m = float(mass[h, j])
            new[h, j] = float(bias[h, j]) + math.log((m + missing / t) / m)
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [1, 2, 7, 50])
def test_equals_the_formula(t, dtype):
    mass, total, bias = (x.to(dtype) for x in problem(t=t))
    found = redistribute(mass, total, bias, LOWER, 50.0)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.numpy(), formula(mass, total, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e10])
def test_matches_the_total_mass_where_no_cap_binds(size):
    mass, total, bias = problem()
    mass, total = mass * size, total * size
    found = redistribute(mass, total, bias, LOWER, 50.0)
    carried = (mass.double() * (found.double() - bias.double()).exp()).sum(dim=1)
    np.testing.assert_allclose(carried.numpy(), total.double().numpy(), rtol=1e-6)


def test_each_entry_gains_the_same_mass():
    mass, total, bias = problem(spread=1.0)
    found = redistribute(mass, total, bias, LOWER, 50.0)
    gained = mass * ((found - bias).exp() - 1)
    equal = gained.mean(dim=1, keepdim=True).expand_as(gained)
    torch.testing.assert_close(gained, equal, rtol=1e-4, atol=1e-5)


def test_nothing_missing_leaves_the_bias():
    mass, _, bias = problem()
    torch.testing.assert_close(redistribute(mass, mass.sum(dim=1), bias, LOWER, UPPER), bias)


def test_missing_mass_is_never_negative():
    """A total below what is selected (rounding, an estimate) takes nothing away."""
    mass, _, bias = problem()
    torch.testing.assert_close(redistribute(mass, 0.5 * mass.sum(dim=1), bias, LOWER, UPPER), bias)


def test_an_entry_without_mass_gets_the_upper_bound():
    mass, total, bias = problem()
    mass[1, 2] = 0.0
    found = redistribute(mass, total, bias, LOWER, UPPER)
    assert torch.isfinite(found).all()
    assert float(found[1, 2]) == pytest.approx(float(bias[1, 2]) + UPPER, abs=1e-6)
    # It counts as one of the t among which the missing mass is shared.
    others = torch.tensor([0, 1, 3, 4, 5, 6])
    share = (float(total[1]) - float(mass[1].sum())) / 7
    expected = bias[1, others] + ((mass[1, others] + share) / mass[1, others]).log()
    torch.testing.assert_close(found[1, others], expected)


def test_no_mass_at_all():
    mass, bias = torch.zeros(2, 3), torch.zeros(2, 3)
    found = redistribute(mass, torch.tensor([0.0, 1.0]), bias, LOWER, UPPER)
    torch.testing.assert_close(found, torch.full((2, 3), UPPER))


def test_masses_that_are_denormal_stay_finite():
    mass, total, bias = problem()
    mass[0, 0], mass[0, 1] = 1e-42, 1e-37
    found = redistribute(mass, total, bias, LOWER, UPPER)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[0, :2], bias[0, :2] + UPPER)


def test_caps_hold_for_the_addition():
    mass, total, bias = problem(spread=3.0)
    bias = bias + 10
    found = redistribute(mass, total, bias, LOWER, 1.0)
    uncapped = torch.from_numpy(formula(mass, total, bias)).float() - bias
    assert bool((uncapped > 1.0).any())
    assert bool((uncapped < 1.0).any())
    torch.testing.assert_close(found - bias, uncapped.clamp(max=1.0), rtol=1e-4, atol=1e-5)
