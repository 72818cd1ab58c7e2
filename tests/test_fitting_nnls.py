"""The two bounded least-squares modes: the published one step by step, the converged one against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentcompact.fitting.nnls import largest_eigenvalue_bound, nnls_converged, nnls_published
from agentcompact.fitting.normal_equations import ridge_of, solve_ridge

optimize = pytest.importorskip("scipy.optimize")

LOWER, UPPER = math.exp(-3.0), math.exp(3.0)


def mass_problem(heads, m, t, seed, spread=1.0, dropped=40):
    """Columns exp(score - row maximum) of t of t + dropped keys, and the row sums over all of them."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(heads, m, 6)), rng.normal(size=(heads, t + dropped, 6)) * spread
    scores = q @ k.transpose(0, 2, 1)
    e = np.exp(scores - scores.max(axis=2, keepdims=True))
    return e[:, :, :t], e.sum(axis=2)


def equations(a, y):
    gram = np.einsum("hmi,hmj->hij", a, a)
    right = np.einsum("hmi,hm->hi", a, y)
    return torch.from_numpy(gram), torch.from_numpy(right)


def collatz_wielandt(gram, steps=10):
    x = np.ones(len(gram))
    for _ in range(steps):
        product = gram @ x
        ratio = product / x
        x = product / product.max()
    return ratio.max()


def published_reference(gram, right, lower, upper, ridge):
    """One head: ridge solve, clamp, two projected-gradient steps."""
    strength = ridge * max(sum(abs(value) for value in row) for row in gram)
    w = np.linalg.solve(gram + strength * np.eye(len(gram)), right)
    w = np.clip(w, lower, upper)
    step = 1 / collatz_wielandt(gram)
    for _ in range(2):
        w = np.clip(w - step * (gram @ w - right), lower, upper)
    return w


def objective(a, y, w):
    return 0.5 * float(((a @ w - y) ** 2).sum())


def batched(gram, heads=1):
    return torch.from_numpy(gram)[None].expand(heads, -1, -1)


@pytest.mark.parametrize("ridge", [1e-6, 1e-3])
@pytest.mark.parametrize(("m", "t"), [(60, 12), (30, 30), (20, 35), (5, 1)])
def test_published_equals_its_reference(m, t, ridge):
    a, y = mass_problem(3, m, t, seed=m + t)
    gram, right = equations(a, y)
    found = nnls_published(gram, right, LOWER, UPPER, ridge)
    expected = [
        published_reference(g, r, LOWER, UPPER, ridge) for g, r in zip(gram.numpy(), right.numpy(), strict=True)
    ]
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-6, atol=1e-9)


def test_published_takes_float32_too():
    a, y = mass_problem(2, 60, 12, seed=5)
    gram, right = equations(a, y)
    found = nnls_published(gram.float(), right.float(), LOWER, UPPER)
    np.testing.assert_allclose(found.numpy(), nnls_published(gram, right, LOWER, UPPER).numpy(), rtol=1e-2)


def test_published_steps_improve_on_the_clamped_solution():
    """The clamp binds here, and the two steps must lower the objective behind it."""
    a, y = mass_problem(4, 40, 30, seed=7)
    gram, right = equations(a, y)
    clamped = solve_ridge(gram, right[..., None], 1e-6)[..., 0].clamp(LOWER, UPPER).numpy()
    stepped = nnls_published(gram, right, LOWER, UPPER).numpy()
    assert not np.allclose(clamped, solve_ridge(gram, right[..., None], 1e-6)[..., 0].numpy())
    for h in range(4):
        assert objective(a[h], y[h], stepped[h]) < objective(a[h], y[h], clamped[h])


def test_published_stays_within_the_bounds():
    a, y = mass_problem(2, 40, 30, seed=8)
    found = nnls_published(*equations(a, y * np.array([[1.0], [0.1]])), 0.5, 1.5)
    assert float(found.min()) == 0.5
    assert float(found.max()) == 1.5


@pytest.mark.parametrize("kind", ["dense", "nearly diagonal", "one column", "blocks", "zero column"])
def test_bound_is_not_below_the_largest_eigenvalue(kind):
    rng = np.random.default_rng(3)
    for trial in range(10):
        a = rng.random(size=(50, 20)) ** (1 + trial)
        if kind == "nearly diagonal":
            a = np.eye(50)[:, :20] * rng.random(20) + 1e-9
        elif kind == "one column":
            a = a[:, :1]
        elif kind == "blocks":
            a[:25, :10] = 0
            a[25:, 10:] = 0
        elif kind == "zero column":
            a[:, 4] = 0
        gram = a.T @ a
        largest = np.linalg.eigvalsh(gram)[-1]
        bound = float(largest_eigenvalue_bound(batched(gram))[0])
        assert bound >= largest * (1 - 1e-12)
        if kind == "dense":
            assert bound <= largest * 1.01
            assert bound == pytest.approx(collatz_wielandt(gram), rel=1e-12)


def test_bound_of_each_head_is_its_own():
    a, _ = mass_problem(3, 40, 10, seed=1)
    a = a * np.array([1.0, 100.0, 1e-3])[:, None, None]
    bounds = largest_eigenvalue_bound(torch.from_numpy(np.einsum("hmi,hmj->hij", a, a)))
    for h in range(3):
        assert float(bounds[h]) == pytest.approx(np.linalg.eigvalsh(a[h].T @ a[h])[-1], rel=0.01)


@pytest.mark.parametrize(("m", "t", "spread"), [(80, 10, 1.0), (120, 25, 1.5), (200, 40, 2.0), (10, 1, 1.0)])
def test_converged_equals_scipy(m, t, spread):
    a, y = mass_problem(3, m, t, seed=t, spread=spread)
    found = nnls_converged(*equations(a, y), LOWER, UPPER).numpy()
    at_bound = 0
    for h in range(3):
        best = optimize.lsq_linear(a[h], y[h], bounds=(LOWER, UPPER), method="bvls", tol=1e-14).x
        at_bound += int(((best <= LOWER) | (best >= UPPER)).sum())
        np.testing.assert_allclose(found[h], best, rtol=1e-4, atol=1e-5)
        assert objective(a[h], y[h], found[h]) <= objective(a[h], y[h], best) * (1 + 1e-7) + 1e-12
    assert t == 1 or at_bound > 0


def test_converged_on_heads_of_different_sizes():
    """Heads share a stopping rule and a momentum; none may be left unfinished for it."""
    a, y = mass_problem(3, 80, 10, seed=10)
    factors = np.array([1.0, 0.01, 50.0])
    a, y = a * factors[:, None, None], y * factors[:, None]
    found = nnls_converged(*equations(a, y), LOWER, UPPER).numpy()
    for h in range(3):
        best = optimize.lsq_linear(a[h], y[h], bounds=(LOWER, UPPER), method="bvls", tol=1e-14).x
        np.testing.assert_allclose(found[h], best, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 0.0])
def test_converged_on_near_singular_problems(gap):
    """Columns in pairs that differ by `gap`: the weights are not determined, the objective is."""
    a, y = mass_problem(3, 90, 12, seed=11)
    noise = np.random.default_rng(0).random(size=a.shape)
    a = np.concatenate([a, a + gap * noise], axis=2)
    found = nnls_converged(*equations(a, y), LOWER, UPPER).numpy()
    assert np.isfinite(found).all()
    for h in range(3):
        best = optimize.lsq_linear(a[h], y[h], bounds=(LOWER, UPPER), tol=1e-12, max_iter=500).x
        reached, least = objective(a[h], y[h], found[h]), objective(a[h], y[h], best)
        assert reached <= least * (1 + 1e-5) + 1e-9
        # What both give to each pair together is determined, if loosely.
        pairs, expected = found[h, :12] + found[h, 12:], best[:12] + best[12:]
        if gap == 0.0:
            np.testing.assert_allclose(pairs, expected, rtol=1e-2, atol=1e-3)


def test_converged_on_more_columns_than_rows():
    a, y = mass_problem(2, 15, 30, seed=4)
    found = nnls_converged(*equations(a, y), LOWER, UPPER).numpy()
    for h in range(2):
        best = optimize.lsq_linear(a[h], y[h], bounds=(LOWER, UPPER), tol=1e-12, max_iter=500).x
        assert objective(a[h], y[h], found[h]) <= objective(a[h], y[h], best) * (1 + 1e-4) + 1e-6


def test_converged_is_not_worse_than_published():
    a, y = mass_problem(4, 60, 30, seed=2)
    gram, right = equations(a, y)
    rough, fine = nnls_published(gram, right, LOWER, UPPER), nnls_converged(gram, right, LOWER, UPPER)
    for h in range(4):
        assert objective(a[h], y[h], fine[h].numpy()) < objective(a[h], y[h], rough[h].numpy())


@pytest.mark.parametrize("solve", [nnls_published, nnls_converged])
@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-7])
def test_duplicated_keys_stay_finite(solve, gap):
    a, y = mass_problem(2, 40, 10, seed=6, dropped=0)
    a = np.concatenate([a, a * (1 + gap), a], axis=2)
    found = solve(*equations(a, y), LOWER, UPPER).numpy()
    assert np.isfinite(found).all()
    assert (found >= LOWER).all()
    assert (found <= UPPER).all()
    # y is the sum of the ten columns, which three copies reach with weights that sum to about 1.
    for h in range(2):
        np.testing.assert_allclose(a[h] @ found[h], y[h], rtol=0.02)


@pytest.mark.parametrize("solve", [nnls_published, nnls_converged])
def test_columns_without_any_mass_stay_finite(solve):
    a, y = mass_problem(2, 40, 10, seed=6)
    a[:, :, 3] = 0.0
    a[:, :, 4] *= 1e-30
    found = solve(*equations(a, y), LOWER, UPPER).numpy()
    assert np.isfinite(found).all()
    assert (found >= LOWER).all()
    assert (found <= UPPER).all()


def test_ridge_is_relative_to_the_largest_row_sum():
    gram = torch.tensor([[[2.0, -1.0], [-1.0, 5.0]], [[1.0, 0.0], [0.0, 0.5]]], dtype=torch.float64)
    torch.testing.assert_close(ridge_of(gram, 0.1), torch.tensor([0.6, 0.1], dtype=torch.float64))
    right = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]], dtype=torch.float64)
    solved = solve_ridge(gram, right, 0.1)
    shifted = gram + torch.tensor([0.6, 0.1], dtype=torch.float64)[:, None, None] * torch.eye(2)
    torch.testing.assert_close(shifted @ solved, right)


def test_solve_ridge_raises_the_ridge_where_it_must():
    """Rounding made this matrix indefinite by more than the ridge; only the damaged head is changed."""
    sound = torch.eye(3, dtype=torch.float64)
    damaged = torch.ones(3, 3, dtype=torch.float64) - 1e-4 * torch.eye(3, dtype=torch.float64)
    right = torch.ones(2, 3, 1, dtype=torch.float64)
    solved = solve_ridge(torch.stack([sound, damaged]), right, 1e-6)
    torch.testing.assert_close(solved[0], right[0] / (1 + 1e-6))
    assert torch.isfinite(solved).all()
    assert float(solved[1].abs().max()) < 10
