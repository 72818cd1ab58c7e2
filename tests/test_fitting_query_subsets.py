"""Subsets of queries, against plain numpy loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentcompact.fitting.query_subsets import (
    RIDGE,
    extreme_subset,
    mahalanobis_subset,
    random_subset,
    select_queries,
)


def some_queries(heads=2, m=60, d=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    spread = torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5])[:d]
    return torch.randn(heads, m, d, generator=g) * spread + torch.randn(heads, 1, d, generator=g)


def covariance_of(x):
    centred = x - x.mean(axis=0)
    covariance = sum(np.outer(row, row) for row in centred) / len(x)
    return centred, covariance + RIDGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))


def generator():
    return torch.Generator().manual_seed(3)


def test_mahalanobis_takes_the_farthest():
    queries = some_queries()
    found = mahalanobis_subset(queries, 7)
    for head, x in enumerate(queries.double().numpy()):
        centred, covariance = covariance_of(x)
        distances = [row @ np.linalg.inv(covariance) @ row for row in centred]
        assert found[head].tolist() == sorted(np.argsort(distances)[-7:].tolist())


@pytest.mark.parametrize("count", [1, 2, 5, 13, 59])
def test_extremes_alternate_and_never_repeat(count):
    queries = some_queries()
    found = extreme_subset(queries, count)
    assert found.shape == (2, count)
    for head, x in enumerate(queries.double().numpy()):
        centred, covariance = covariance_of(x)
        values, vectors = np.linalg.eigh(covariance)
        chosen = []
        for turn in range(count):
            vector = vectors[:, np.argsort(-values)[turn // 2 % 5]]
            vector = vector * np.sign(vector[np.abs(vector).argmax()])
            signed = centred @ vector * (1 if turn % 2 == 0 else -1)
            signed[chosen] = -np.inf
            chosen.append(int(signed.argmax()))
        assert found[head].tolist() == sorted(chosen)


def test_random_rows_differ_by_head_and_repeat_with_the_seed():
    queries = some_queries()
    found = random_subset(queries, 10, generator())
    assert torch.equal(found, random_subset(queries, 10, generator()))
    assert found[0].tolist() != found[1].tolist()
    for row in found.tolist():
        assert row == sorted(set(row))


def test_mean_is_one_query():
    queries = some_queries()
    found = select_queries("mean", queries, 10, generator())
    np.testing.assert_allclose(found[:, 0].numpy(), queries.numpy().mean(axis=1), rtol=1e-5)
    assert found.shape == (2, 1, 5)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("random", lambda q: random_subset(q, 9, generator())),
        ("mahalanobis", lambda q: mahalanobis_subset(q, 9)),
        ("extremes", lambda q: extreme_subset(q, 9)),
    ],
)
def test_select_takes_the_rows_of_each_head(kind, rows):
    queries = some_queries()
    found = select_queries(kind, queries, 9, generator())
    for head, chosen in enumerate(rows(queries)):
        assert torch.equal(found[head], queries[head, chosen])
    assert torch.equal(select_queries(kind, queries, 60, generator()), queries)


@pytest.mark.parametrize("kind", ["mahalanobis", "extremes"])
def test_queries_all_alike_or_in_a_plane_are_no_trouble(kind):
    flat = some_queries()
    flat[..., 3:] = 1.0
    assert select_queries(kind, flat, 8, generator()).shape == (2, 8, 5)
    assert select_queries(kind, torch.ones(2, 20, 5), 8, generator()).shape == (2, 8, 5)
    assert select_queries(kind, torch.zeros(1, 20, 5), 8, generator()).shape == (1, 8, 5)


def test_half_precision_queries_keep_their_type():
    queries = some_queries().bfloat16()
    for kind in ("random", "mahalanobis", "extremes", "mean"):
        assert select_queries(kind, queries, 4, generator()).dtype == torch.bfloat16
