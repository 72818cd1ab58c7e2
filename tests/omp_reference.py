"""Matching pursuit of keys in plain loops, shared by the tests; holds no tests itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentcompact.fitting.omp import DROPPED, LOWER, ROUNDS, UPPER, matching_pursuit

optimize = pytest.importorskip("scipy.optimize")

SCALING = 0.7


def problem(heads=2, m=80, n=24, d=6, spread=1.5, seed=0):
    """Return (queries, keys, bias, row maximum, row sum)."""
    g = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(heads, m, d, generator=g), spread * torch.randn(heads, n, d, generator=g)
    bias = 0.5 * torch.randn(heads, n, generator=g)
    return with_targets(queries, keys, bias)


def with_targets(queries, keys, bias):
    scores = SCALING * queries @ keys.transpose(1, 2) + bias[:, None]
    top = scores.amax(dim=2)
    return queries, keys, bias, top, (scores - top[..., None]).exp().sum(dim=2)


def pursue(given, count, **options):
    queries, keys, bias, top, target = given
    return matching_pursuit(queries, keys, bias, SCALING, top, target, count, **options)


def columns_of(given):
    """Per head (A, y) in float64, in plain numpy."""
    queries, keys, bias, top, target = (t.double().numpy() for t in given)
    for h in range(len(queries)):
        scores = SCALING * queries[h] @ keys[h].T + bias[h]
        yield np.exp(scores - top[h][:, None]), target[h]


def residuals(given, indices, log_weights):
    weights = log_weights.double().exp().numpy()
    pairs = zip(columns_of(given), indices.numpy(), weights, strict=True)
    return np.array([np.linalg.norm(y - a[:, i] @ w) for (a, y), i, w in pairs])


def exact_fit(a, y):
    return optimize.lsq_linear(a, y, bounds=(LOWER, UPPER), method="bvls", tol=1e-14, max_iter=2000).x


def published_fit(a, y, ridge=1e-6):
    gram, right = a.T @ a, a.T @ y
    strength = ridge * np.abs(gram).sum(axis=1).max()
    w = np.clip(np.linalg.solve(gram + strength * np.eye(len(gram)), right), LOWER, UPPER)
    x = np.ones(len(gram))
    for _ in range(10):
        bound, x = (gram @ x / x).max(), gram @ x / (gram @ x).max()
    for _ in range(2):
        w = np.clip(w - (gram @ w - right) / bound, LOWER, UPPER)
    return w


def reference(a, y, count, fit, schedule):
    """The search as it is defined: (indices, weights) of one head, and the rounds that replaced keys."""
    chosen, banned = [], set()

    def grow():
        w, residual, steps = np.empty(0), y, 0
        if chosen:
            w = fit(a[:, chosen], y)
            residual = y - a[:, chosen] @ w
        while len(chosen) < count:
            keys, interval = schedule(len(chosen))
            free = [j for j in range(a.shape[1]) if j not in chosen and j not in banned]
            free = free or [j for j in range(a.shape[1]) if j not in chosen]
            free.sort(key=lambda j: -(a[:, j] @ residual))
            chosen.extend(free[: min(keys, count - len(chosen))])
            steps += 1
            if steps >= interval or len(chosen) == count:
                w, steps = fit(a[:, chosen], y), 0
                residual = y - a[:, chosen] @ w
        return w

    weights, rounds = grow(), 0
    while rounds < ROUNDS and min(weights) < DROPPED:
        banned |= {j for j, w in zip(chosen, weights, strict=True) if w < DROPPED}
        chosen[:] = [j for j in chosen if j not in banned]
        weights = grow()
        rounds += 1
    order = np.argsort(chosen)
    return np.array(chosen)[order], weights[order], rounds


def unit_fit(a, y):
    """Columns of length 1 need other bounds; none of them binds here but zero."""
    return optimize.lsq_linear(a, y, bounds=(LOWER, np.inf), method="bvls", tol=1e-14, max_iter=2000).x
