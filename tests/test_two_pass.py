"""two_pass against a slow reading of its definition, on a tiny Llama and on heavy-tailed attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokens

from agentcompact import CompactionRequest, TransformersEngine, make_strategy
from agentcompact.fitting import scored_keys
from agentcompact.fitting.attention_statistics import attention_statistics
from agentcompact.strategies.attention_matching import ScoredHeads
from agentcompact.strategies.base import HeadGroup, Phases

TOKENS = 200
SCALING = 16**-0.5


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def engine(llama):
    return TransformersEngine(llama)


@pytest.fixture(scope="module")
def cache(engine):
    return engine.prefill(tiny_tokens(TOKENS), capture_seed=0)


@pytest.fixture(scope="module")
def attention(llama):
    """Per layer (queries (4, N, 16), keys (2, N, 16), values (2, N, 16)) in float64, from the projections."""
    taken = {}

    def keep(name):
        def hook(_module, _inputs, output):
            taken[name] = output[0].double().numpy()

        return hook

    handles = []
    for index, layer in enumerate(llama.causal_lm.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name)
            handles.append(projection.register_forward_hook(keep((index, name))))
    try:
        with torch.no_grad():
            llama.causal_lm(input_ids=torch.tensor([tiny_tokens(TOKENS)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for index in range(2):
        q, k, v = (
            taken[index, name].reshape(TOKENS, -1, 16).transpose(1, 0, 2) for name in ("q_proj", "k_proj", "v_proj")
        )
        layers.append((rotated(q), rotated(k), v))
    return layers


def rotated(x):
    """RoPE, base 10,000, halves paired (d, d + 8): x (heads, N, 16)."""
    turned = x.copy()
    for position in range(x.shape[1]):
        for pair in range(8):
            angle = position * 10_000.0 ** (-2 * pair / 16)
            a, b = x[:, position, pair], x[:, position, pair + 8]
            turned[:, position, pair] = a * math.cos(angle) - b * math.sin(angle)
            turned[:, position, pair + 8] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def root_mean_square(scores):
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = e / e.sum(axis=1, keepdims=True)
    return np.sqrt((weights**2).mean(axis=0))


def best(scores, count):
    return sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:count])


def slow_two_pass(queries, keys, bias, rows, budget, k, upper, count_rest=False):
    """One KV head: pooled queries (m, d), keys (N, d), bias (N,), first-pass rows -> indices, biases."""
    first = SCALING * queries[rows] @ keys.T + bias
    shortlist = best(root_mean_square(first), math.ceil(k * budget))
    second = SCALING * queries @ keys[shortlist].T + bias[shortlist]
    chosen = best(root_mean_square(second), budget)
    e = np.exp(second - second.max())
    masses = e.mean(axis=0)
    total = masses.sum()
    if count_rest:
        everything = np.exp(first - first.max()).mean(axis=0)
        total *= everything.sum() / everything[shortlist].sum()
    missing = total - masses[chosen].sum()
    new = [
        bias[shortlist[j]] + min(max(math.log((masses[j] + missing / budget) / masses[j]), -3.0), upper) for j in chosen
    ]
    return [shortlist[j] for j in chosen], np.array(new)


def request_of(engine, cache, budget, seed=0):
    return CompactionRequest(engine=engine, cache=cache, budget=budget, seed=seed)


def first_rows(strategy, layer, head, seed, total=2 * TOKENS):
    blank = torch.zeros(1, total, 16)
    group = HeadGroup(range(head, head + 1), blank, blank, blank[..., 0], blank[..., 0], blank)
    return strategy._first_pass_rows(group, head, layer, seed).numpy()


def test_captured_queries_and_entries_are_those_of_the_projections(cache, attention):
    """The ground under the tests below: post-RoPE queries and keys, as the model computes them."""
    for layer, (q, k, v) in enumerate(attention):
        span = cache.source(layer, 0, TOKENS)
        np.testing.assert_allclose(cache.captured.layer(layer).numpy(), q, atol=1e-3)
        np.testing.assert_allclose(span.dense(span.keys).numpy(), k, atol=1e-3)
        np.testing.assert_allclose(span.dense(span.values).numpy(), v, atol=1e-3)
    assert cache.captured.positions.tolist() == list(range(TOKENS))


def test_first_pass_rows_are_random_seeded_and_without_repeats():
    strategy = make_strategy("two_pass", first_pass_queries=48)
    rows = first_rows(strategy, layer=0, head=0, seed=0)
    assert len(set(rows.tolist())) == 48
    assert rows.min() >= 0
    assert rows.max() < 2 * TOKENS
    assert (rows >= TOKENS).any()  # both query heads of the group
    assert (rows < TOKENS).any()
    assert rows.tolist() == first_rows(strategy, 0, 0, 0).tolist()
    others = [first_rows(strategy, *which).tolist() for which in ((0, 1, 0), (1, 0, 0), (0, 0, 1))]
    assert len({tuple(rows.tolist()), *map(tuple, others)}) == 4


@pytest.mark.parametrize(("budget", "k", "seed"), [(10, 5.0, 0), (10, 5.0, 7), (25, 2.0, 0), (7, 1.5, 3), (1, 5.0, 0)])
def test_equals_the_slow_reference(engine, cache, attention, budget, k, seed):
    strategy = make_strategy("two_pass", first_pass_queries=48, shortlist=k)
    new = strategy.compact(request_of(engine, cache, budget, seed)).cache
    upper = max(3.0, math.log(2 * TOKENS / budget))
    capped = 0
    for layer, (q, keys, values) in enumerate(attention):
        for head in range(2):
            pooled = np.concatenate([q[2 * head], q[2 * head + 1]])
            rows = first_rows(strategy, layer, head, seed)
            indices, bias = slow_two_pass(pooled, keys[head], np.zeros(TOKENS), rows, budget, k, upper)
            got_keys, got_values, got_bias, positions = new.source(layer, 0, TOKENS).head(head)
            assert positions.tolist() == indices
            np.testing.assert_allclose(got_bias.numpy(), bias, atol=2e-3)
            np.testing.assert_allclose(got_keys.numpy(), keys[head][indices], atol=1e-3)
            np.testing.assert_allclose(got_values.numpy(), values[head][indices], atol=1e-3)
            original = cache.source(layer, 0, TOKENS).head(head)
            assert torch.equal(got_keys, original[0][indices])
            assert torch.equal(got_values, original[1][indices])
            capped += int((bias >= upper - 1e-9).sum())
    assert capped < 4 * budget or budget == 1


def test_equals_the_slow_reference_on_a_cache_compacted_before(engine, cache, attention):
    """Entries' biases count in every score and mass; the mass off the shortlist is added by default."""
    once = make_strategy("two_pass", first_pass_queries=48).compact(request_of(engine, cache, 80)).cache
    strategy = make_strategy("two_pass", first_pass_queries=48, shortlist=2.0)
    without = make_strategy("two_pass", first_pass_queries=48, shortlist=2.0, count_rest=False)
    twice = strategy.compact(request_of(engine, once, 15)).cache
    plain = without.compact(request_of(engine, once, 15)).cache
    assert once.is_compacted
    differences = []
    for layer, (q, _, _) in enumerate(attention):
        for head in range(2):
            keys, _, bias, positions = once.source(layer, 0, TOKENS).head(head)
            pooled = np.concatenate([q[2 * head], q[2 * head + 1]])
            rows = first_rows(strategy, layer, head, 0)
            for cache_, count_rest in ((twice, True), (plain, False)):
                indices, new = slow_two_pass(
                    pooled, keys.double().numpy(), bias.double().numpy(), rows, 15, 2.0, 3.0, count_rest
                )
                got = cache_.source(layer, 0, TOKENS).head(head)
                assert got[3].tolist() == positions[indices].tolist()
                np.testing.assert_allclose(got[2].numpy(), new, atol=2e-3)
            differences.append(
                float(
                    (twice.source(layer, 0, TOKENS).head(head)[2] - plain.source(layer, 0, TOKENS).head(head)[2]).max()
                )
            )
    assert max(differences) > 0.01


@pytest.mark.parametrize(("budget", "k"), [(40, 5.0), (67, 3.0), (100, 2.0), (30, 50.0)])
def test_shortlist_of_everything_equals_high_attn(engine, cache, budget, k):
    two_pass = make_strategy("two_pass", shortlist=k, first_pass_queries=3)
    high = make_strategy("high_attn", bias="redistribute", values="direct")
    a, b = (s.compact(request_of(engine, cache, budget)).cache for s in (two_pass, high))
    for layer in range(2):
        for x, y in zip(a.source(layer, 0, TOKENS), b.source(layer, 0, TOKENS), strict=True):
            assert all(torch.equal(s, t) for s, t in zip(x, y, strict=True))


@pytest.mark.parametrize(("k", "passes"), [(5.0, 1), (4.9, 2)])
def test_a_first_pass_that_cannot_choose_is_skipped(engine, cache, monkeypatch, k, passes):
    calls = []

    def counted(queries, *rest, **named):
        calls.append(queries.shape[1])
        return attention_statistics(queries, *rest, **named)

    monkeypatch.setattr(scored_keys, "attention_statistics", counted)
    strategy = make_strategy("two_pass", shortlist=k, first_pass_queries=3)
    strategy.compact(request_of(engine, cache, TOKENS // 5))
    assert calls == ([2 * TOKENS] if passes == 1 else [3, 2 * TOKENS]) * 2  # in each of the two layers


def test_a_shorter_shortlist_does_differ(engine, cache):
    """Guards the test above: three first-pass queries choose badly, so their pass is really skipped there."""
    two_pass = make_strategy("two_pass", shortlist=1.0, first_pass_queries=3)
    high = make_strategy("high_attn", bias="redistribute", values="direct")
    a, b = (s.compact(request_of(engine, cache, 40)).cache for s in (two_pass, high))
    assert a.source(0, 0, TOKENS).positions.tolist() != b.source(0, 0, TOKENS).positions.tolist()


def heavy_tailed(heads=6, n=400, m=800, d=16, seed=0):
    """Most queries look the same way, and a few keys matter to a few queries only."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(heads, n, d, generator=g)
    keys = keys * torch.exp(0.6 * torch.randn(heads, n, 1, generator=g))
    common = torch.randn(heads, 1, d, generator=g)
    queries = common + torch.randn(heads, m, d, generator=g) * torch.exp(0.7 * torch.randn(heads, m, 1, generator=g))
    return HeadGroup(
        range(heads), keys, torch.randn(heads, n, d, generator=g), torch.zeros(heads, n),
        torch.arange(n, dtype=torch.int32).expand(heads, n), queries,
    )  # fmt: skip


def overlap(a, b):
    return float(np.mean([len(set(x.tolist()) & set(y.tolist())) / len(x) for x, y in zip(a, b, strict=True)]))


def select(engine, cache, group, name, seed=0, budget=20, **settings):
    strategy = make_strategy(name, bias="redistribute", values="direct", **settings)
    request = request_of(engine, cache, budget, seed)
    shortlisted = math.ceil(strategy.settings.shortlist * budget)
    part = ScoredHeads(group, strategy._score(group, 0, shortlisted, request))
    return strategy._fit_heads(part, slice(0, len(group.heads)), budget, request, Phases())[3]


def test_overlap_with_full_selection_rises_with_the_shortlist(engine, cache):
    groups = [heavy_tailed(seed=s) for s in range(3)]
    found = {
        k: np.mean([
            overlap(
                select(engine, cache, group, "two_pass", first_pass_queries=32, shortlist=k),
                select(engine, cache, group, "high_attn"),
            )
            for group in groups
        ])
        for k in (1, 2, 3, 5)
    }  # fmt: skip
    assert found[1] < 0.8
    assert found[1] + 0.05 < found[2] < found[3] < found[5]
    assert found[5] > 0.9


def test_more_first_pass_queries_choose_better(engine, cache):
    group = heavy_tailed()
    full = select(engine, cache, group, "high_attn")
    found = [
        overlap(select(engine, cache, group, "two_pass", first_pass_queries=count, shortlist=2.0), full)
        for count in (2, 16, 800)
    ]
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.97


def test_one_seed_one_result_another_mostly_the_same(engine, cache):
    strategy = make_strategy("two_pass", first_pass_queries=64)
    a, b, c = (strategy.compact(request_of(engine, cache, 12, seed)).cache for seed in (0, 0, 1))
    agreement = []
    for layer in range(2):
        spans = [x.source(layer, 0, TOKENS) for x in (a, b, c)]
        for name in ("keys", "values", "bias", "positions"):
            assert torch.equal(getattr(spans[0], name), getattr(spans[1], name))
        agreement.append(overlap(spans[0].dense(spans[0].positions), spans[2].dense(spans[2].positions)))
    assert np.mean(agreement) > 0.75
    group = heavy_tailed()
    few = {"first_pass_queries": 32, "shortlist": 3.0}
    one, two = (select(engine, cache, group, "two_pass", seed=seed, **few) for seed in (0, 1))
    assert 0.75 < overlap(one, two) < 1.0
