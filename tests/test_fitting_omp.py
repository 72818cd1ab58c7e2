"""Orthogonal matching pursuit, against plain loops written from the definition with scipy as the solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omp_reference import (
    SCALING,
    columns_of,
    exact_fit,
    problem,
    published_fit,
    pursue,
    reference,
    residuals,
    unit_fit,
    with_targets,
)

from agentcompact.fitting import omp
from agentcompact.fitting.omp import (
    DROPPED,
    pace,
    pursue_equations,
)


@pytest.mark.parametrize("count", [1, 5, 10])
@pytest.mark.parametrize("n", [12, 24, 30])
def test_exact_equals_its_reference(n, count):
    given = problem(n=n, seed=n)
    indices, weights = pursue(given, count, mode="exact")
    for h, (a, y) in enumerate(columns_of(given)):
        chosen, expected, _ = reference(a, y, count, exact_fit, lambda _: (1, 1))
        assert indices[h].tolist() == chosen.tolist()
        np.testing.assert_allclose(weights[h].exp().numpy(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 10])
@pytest.mark.parametrize("n", [12, 24, 30])
def test_published_equals_its_reference(n, count):
    given = problem(n=n, seed=100 + n)
    indices, weights = pursue(given, count)
    for h, (a, y) in enumerate(columns_of(given)):
        chosen, expected, _ = reference(a, y, count, published_fit, pace)
        assert indices[h].tolist() == chosen.tolist()
        np.testing.assert_allclose(weights[h].exp().numpy(), expected, rtol=1e-3, atol=1e-6)


def test_the_schedule_in_its_faster_parts(monkeypatch):
    """Shortened, so that 2 and then 4 keys a step are added, with a refit every other step."""
    monkeypatch.setattr(omp, "SCHEDULE", ((3, 1, 1), (9, 2, 2), (None, 4, 2)))
    given = problem(m=200, n=40, spread=1.0, seed=4)
    for count in (3, 5, 8, 14, 20):
        indices, _ = pursue(given, count)
        for h, (a, y) in enumerate(columns_of(given)):
            chosen, _, _ = reference(a, y, count, published_fit, omp.pace)
            assert indices[h].tolist() == chosen.tolist()


def test_the_published_schedule():
    assert [pace(size) for size in (0, 299)] == [(1, 1)] * 2
    assert [pace(size) for size in (300, 1499)] == [(2, 2)] * 2
    assert [pace(size) for size in (1500, 9999)] == [(4, 2)] * 2


def test_refits_follow_the_schedule(monkeypatch):
    sizes = []
    solve = omp.nnls_published
    monkeypatch.setattr(omp, "SCHEDULE", ((4, 1, 1), (12, 2, 2), (None, 4, 2)))
    monkeypatch.setattr(omp, "DROPPED", 0.0)
    monkeypatch.setattr(omp, "nnls_published", lambda g, *rest: sizes.append(g.shape[1]) or solve(g, *rest))
    pursue(problem(heads=1, n=40), 23)
    assert sizes == [1, 2, 3, 4, 8, 12, 20, 23]


@pytest.mark.parametrize("mode", ["published", "exact"])
def test_the_residual_never_grows_with_more_keys(mode):
    for seed in range(4):
        given = problem(m=150, n=30, seed=seed)
        before = np.full(2, np.inf)
        for count in range(1, 30):
            now = residuals(given, *pursue(given, count, mode=mode))
            assert (now <= before * (1.001 if mode == "exact" else 1.02) + 1e-4).all()
            before = now
        assert (before < 0.2 * residuals(given, *pursue(given, 2, mode=mode))).all()


def test_fewer_errors_than_the_largest_masses():
    given = problem(m=300, n=30, seed=9)
    found = residuals(given, *pursue(given, 6, mode="exact"))
    for h, (a, y) in enumerate(columns_of(given)):
        largest = np.argsort(-a.sum(axis=0))[:6]
        assert found[h] < np.linalg.norm(y - a[:, largest] @ exact_fit(a[:, largest], y))


def equations_with_a_useless_key():
    """Key 0 correlates most at first, and keys 1 and 2 then carry the target without it. (AᵀA, Aᵀy)."""
    a = np.zeros((8, 5))
    a[:5, 0] = 1
    a[:2, 1] = a[2:4, 2] = 1
    a[6, 3] = a[7, 4] = 0.1
    y = a @ np.array([0.0, 2.0, 1.0, 3.0, 2.0])
    assert (a.T @ y).argmax() == 0
    return torch.from_numpy(a.T @ a)[None], torch.from_numpy(a.T @ y)[None]


@pytest.mark.parametrize("mode", ["published", "exact"])
def test_dropped_keys_are_replaced(mode, monkeypatch):
    gram, right = equations_with_a_useless_key()
    chosen, weights = pursue_equations(gram, right, 4, mode)
    assert chosen[0].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(weights[0].numpy(), [2, 1, 3, 2], rtol=0.01)
    monkeypatch.setattr(omp, "ROUNDS", 0)
    chosen, weights = pursue_equations(gram, right, 4, mode)
    assert chosen[0].tolist() == [0, 1, 2, 3]
    assert float(weights[0, 0]) < DROPPED


def test_heads_that_drop_and_heads_that_do_not_go_together():
    gram, right = equations_with_a_useless_key()
    other = torch.diag(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64))[None]
    both, alike = torch.cat([other, gram, other]), torch.cat([other.sum(2), right, other.sum(2)])
    chosen, weights = pursue_equations(both, alike, 4)
    assert chosen.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3]]
    np.testing.assert_allclose(weights[0].numpy(), np.ones(4), rtol=1e-4)


def test_normalised_products_prefer_the_direction_over_the_length():
    a = np.array([[3.0, 1.0], [0.0, 1.0], [9.0, 0.0]])  # key 0 is long, key 1 points at the target
    y = np.array([1.0, 1.0, 0.0])
    gram, right = torch.from_numpy(a.T @ a)[None], torch.from_numpy(a.T @ y)[None]
    assert pursue_equations(gram, right, 1)[0].tolist() == [[0]]
    assert pursue_equations(gram, right, 1, normalised=True)[0].tolist() == [[1]]


@pytest.mark.parametrize("count", [1, 5, 10])
def test_normalised_equals_its_reference(count):
    given = problem(n=24, seed=31)
    indices, _ = pursue(given, count, mode="exact", normalised=True)
    for h, (a, y) in enumerate(columns_of(given)):
        lengths = np.linalg.norm(a, axis=0)
        chosen, _, _ = reference(a / lengths, y, count, unit_fit, lambda _: (1, 1))
        assert indices[h].tolist() == chosen.tolist()


def test_replacing_ends_where_every_key_left_was_dropped():
    """All but one key have no mass of their own: what was dropped comes back, and the search ends."""
    gram = torch.zeros(1, 4, 4, dtype=torch.float64)
    gram[0, 0, 0] = 1.0
    right = torch.tensor([[2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for mode in ("published", "exact"):
        chosen, weights = pursue_equations(gram, right, 3, mode)
        assert len(set(chosen[0].tolist())) == 3
        assert 0 in chosen[0].tolist()
        assert torch.isfinite(weights.log()).all()
        assert float(weights[0, 0]) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("mode", ["published", "exact"])
def test_copies_of_keys_do_no_harm(mode):
    queries, keys, bias, _, _ = problem(m=120, n=8, seed=2)
    given = with_targets(queries, keys.repeat(1, 3, 1), bias.repeat(1, 3))
    for count in (8, 12, 20):
        indices, weights = pursue(given, count, mode=mode)
        assert torch.isfinite(weights).all()
        assert all(row == sorted(set(row)) for row in indices.tolist())
    indices, weights = pursue(given, 8, mode="exact")
    _, total = next(iter(columns_of(given)))
    assert residuals(given, indices, weights)[0] < 0.05 * np.linalg.norm(total)


def test_as_many_keys_as_there_are_come_with_weight_one():
    given = problem(n=10)
    for count in (10, 15):
        indices, weights = pursue(given, count)
        assert indices.tolist() == [list(range(10))] * 2
        assert weights.tolist() == [[0.0] * 10] * 2


@pytest.mark.parametrize("mode", ["published", "exact"])
def test_a_sample_of_queries_searches_and_all_fit(mode):
    given = problem(m=400, n=30, seed=6)
    indices, weights = pursue(given, 8, mode=mode, max_queries=100)
    for h, (a, y) in enumerate(columns_of(given)):
        fit = exact_fit if mode == "exact" else published_fit
        expected = fit(a[:, indices[h].numpy()], y)
        np.testing.assert_allclose(weights[h].exp().numpy(), expected, rtol=2e-3, atol=1e-4)
    again = pursue(given, 8, mode=mode, max_queries=100)
    assert torch.equal(again[0], indices)
    assert torch.equal(again[1], weights)


def test_candidates_are_the_longest_columns():
    given = problem(m=200, n=30, spread=2.5, seed=8)
    indices, _ = pursue(given, 2, max_candidates=16)
    narrow, _ = pursue(given, 1, max_candidates=8)
    for h, (a, _) in enumerate(columns_of(given)):
        longest = np.argsort(-(a**2).sum(axis=0))
        assert set(indices[h].tolist()) <= set(longest[:16].tolist())
        assert set(narrow[h].tolist()) <= set(longest[:8].tolist())


def test_scores_of_any_size_stay_finite():
    queries, keys, bias, _, _ = problem(n=20)
    given = with_targets(queries * 40, keys, bias + 300)
    indices, weights = pursue(given, 7)
    assert torch.isfinite(weights).all()
    assert indices.shape == weights.shape == (2, 7)


@pytest.mark.parametrize("mode", ["published", "exact"])
def test_heads_together_choose_as_each_alone(mode):
    given = problem(heads=3, m=120, n=40, seed=12)
    rows = omp.random_rows(120, 60, torch.Generator().manual_seed(0))
    queries, keys, bias, top, target = given
    search = omp._Search(SCALING, rows, 40, 6, mode, False)
    together = omp._pursue(search, queries, keys, bias, top, target)
    alone, alone_weights = pursue(given, 6, mode=mode, max_queries=60)
    assert torch.equal(together[0], alone)
    torch.testing.assert_close(together[1], alone_weights, rtol=1e-4, atol=1e-4)
