"""attention_statistics against one softmax after another in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentcompact.fitting import attention_statistics as module
from agentcompact.fitting.attention_statistics import attention_statistics

SCORES = ("rms", "mean", "max")
NAMES = ("mass", "log_scale", "log_normalizer", "row_maximum", "output")


def naive(queries, keys, bias, scaling, values):
    """Every statistic from its definition, query by query."""
    q, k, b, v = (t.double().numpy() for t in (queries, keys, bias, values))
    heads, m, _ = q.shape
    found = {name: [] for name in (*SCORES, *NAMES)}
    for h in range(heads):
        scores = np.empty((m, k.shape[1]))
        for i in range(m):
            for j in range(k.shape[1]):
                scores[i, j] = scaling * float(np.dot(q[h, i], k[h, j])) + b[h, j]
        top = scores.max(axis=1)
        weights, outputs, log_normalizer = [], [], []
        for i in range(m):
            e = np.exp(scores[i] - top[i])
            weights.append(e / e.sum())
            outputs.append(sum(weight * row for weight, row in zip(weights[i], v[h], strict=True)))
            log_normalizer.append(top[i] + math.log(e.sum()))
        weights = np.array(weights)
        scale = scores.max()
        found["rms"].append(np.sqrt((weights**2).mean(axis=0)))
        found["mean"].append(weights.mean(axis=0))
        found["max"].append(weights.max(axis=0))
        found["mass"].append(np.exp(scores - scale).mean(axis=0))
        found["log_scale"].append(scale)
        found["log_normalizer"].append(log_normalizer)
        found["row_maximum"].append(top)
        found["output"].append(outputs)
    return {name: np.array(rows) for name, rows in found.items()}


def problem(heads=3, m=23, n=17, d=8, dv=5, spread=1.0, bias_spread=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    # A head of its own offset and spread, so that a scale shared between heads or blocks would show.
    strength = spread * torch.linspace(0.5, 2.0, heads)[:, None, None]
    queries = torch.randn(heads, m, d, generator=g) * strength
    keys = torch.randn(heads, n, d, generator=g)
    bias = torch.randn(heads, n, generator=g) * bias_spread
    values = torch.randn(heads, n, dv, generator=g)
    return queries, keys, bias, 0.3, values


def check(compute, expected, rtol=2e-5, atol=1e-6):
    """compute(score) gives the statistics with that score; everything else must not depend on it."""
    for score in SCORES:
        found = compute(score)
        assert torch.isfinite(found.score).all(), score
        np.testing.assert_allclose(found.score.numpy(), expected[score], rtol=rtol, atol=atol, err_msg=score)
        check_rest(found, expected, rtol, atol)


def check_rest(found, expected, rtol, atol):
    for name in NAMES:
        got = getattr(found, name)
        assert torch.isfinite(got).all(), name
        assert got.dtype == torch.float32
        assert got.shape == expected[name].shape, name
        np.testing.assert_allclose(got.numpy(), expected[name], rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("rows_at_once", [1, 2, 7, 1000])
@pytest.mark.parametrize("heads", [1, 3])
def test_equals_naive_softmax(monkeypatch, heads, rows_at_once):
    arguments = problem(heads=heads)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", rows_at_once * 17)
    check(lambda score: attention_statistics(*arguments, score=score), naive(*arguments))


@pytest.mark.parametrize("rows_at_once", [1, 5, 1000])
def test_batched_over_heads_as_on_a_gpu(monkeypatch, rows_at_once):
    arguments = problem(heads=4)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", rows_at_once * 4 * 17)
    queries, keys, bias, scaling, values = arguments
    check(
        lambda score: module._statistics(queries, keys, bias, values, scaling=scaling, score=score, with_mass=True),
        naive(*arguments),
    )


def test_block_smaller_than_one_row(monkeypatch):
    arguments = problem(m=4)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3)
    check(lambda score: attention_statistics(*arguments, score=score), naive(*arguments))


def test_small_masses_are_right_relatively():
    arguments = problem(spread=4.0, bias_spread=3.0, seed=1)
    found, expected = attention_statistics(*arguments), naive(*arguments)
    assert expected["mass"].min() < 1e-6
    np.testing.assert_allclose(found.mass.numpy(), expected["mass"], rtol=2e-4)
    np.testing.assert_allclose(found.score.numpy(), expected["rms"], rtol=2e-4)


@pytest.mark.parametrize("rising", [True, False])
def test_scores_of_200_both_ways(monkeypatch, rising):
    """The common scale moves by hundreds between blocks, in both orders."""
    g = torch.Generator().manual_seed(2)
    heads, m, n = 2, 24, 9
    level = torch.linspace(-200, 200, m) if rising else torch.linspace(200, -200, m)
    queries = torch.stack([level, torch.ones(m)], dim=1).expand(heads, m, 2).clone()
    keys = torch.stack([torch.linspace(-1, 1, n), torch.randn(n, generator=g)], dim=1)
    keys = keys.expand(heads, n, 2).clone()
    bias = torch.randn(heads, n, generator=g)
    values = torch.randn(heads, n, 3, generator=g)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 4 * n)
    arguments = (queries, keys, bias, 1.0, values)
    expected = naive(*arguments)
    assert expected["row_maximum"].max() > 195
    check(lambda score: attention_statistics(*arguments, score=score), expected, rtol=2e-4)


def test_all_scores_of_a_query_far_below_the_others():
    """A query at -200 everywhere adds nothing to the masses, and a whole softmax to the weights."""
    queries = torch.tensor([[[200.0], [-200.0]]])
    keys = torch.ones(1, 4, 1)
    values = torch.arange(4.0).reshape(1, 4, 1)
    found = attention_statistics(queries, keys, torch.zeros(1, 4), 1.0, values, score="mean")
    torch.testing.assert_close(found.mass, torch.full((1, 4), 0.5))
    torch.testing.assert_close(found.score, torch.full((1, 4), 0.25))
    torch.testing.assert_close(found.row_maximum, torch.tensor([[200.0, -200.0]]))
    torch.testing.assert_close(found.log_normalizer, torch.tensor([[200.0, -200.0]]) + math.log(4))
    torch.testing.assert_close(found.output, torch.full((1, 2, 1), 1.5))


def test_bfloat16_inputs_are_computed_in_float32():
    queries, keys, bias, scaling, values = problem()
    half = [t.to(torch.bfloat16) for t in (queries, keys, values)]
    check(
        lambda score: attention_statistics(half[0], half[1], bias, scaling, half[2], score=score),
        naive(half[0].float(), half[1].float(), bias, scaling, half[2].float()),
    )


def test_without_values_there_is_no_output():
    queries, keys, bias, scaling, values = problem()
    without = attention_statistics(queries, keys, bias, scaling)
    assert without.output is None
    torch.testing.assert_close(without.score, attention_statistics(queries, keys, bias, scaling, values).score)


def test_inputs_are_left_as_they_were():
    arguments = problem()
    before = [t.clone() for t in arguments if isinstance(t, torch.Tensor)]
    attention_statistics(*arguments)
    after = [t for t in arguments if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
