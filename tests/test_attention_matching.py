"""Attention matching against a slow reference written from its definition, and what its settings choose."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from tiny import tiny_model, tiny_tokens

from agentcompact import CompactionRequest, TransformersEngine, make_strategy
from agentcompact.errors import BudgetError, ContextLengthError, SettingsError
from agentcompact.strategies.attention_matching import bias_bounds

TOKENS, BUDGET = 10, 4
PRESETS = ["attention_matching", "high_attn", "high_attn_direct", "high_attn_redist_direct", "two_pass", "omp"]


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"))


@pytest.fixture
def cache(engine):
    return engine.prefill(tiny_tokens(TOKENS), capture_seed=0)


def compact(engine, cache, name, budget=BUDGET, seed=0, **settings):
    return make_strategy(name, **settings).compact(CompactionRequest(engine, cache, budget, seed=seed)).cache


def heads_of(engine, cache):
    """Per layer and KV head: the pooled queries, and keys and values, in float64."""
    for index, _ in cache.full_layers:
        queries, span = cache.captured.layer(index).double().numpy(), cache.source(index, 0, cache.next_position)
        for head in range(span.heads):
            keys, values, _, _ = span.head(head)
            yield index, head, np.concatenate(queries[2 * head : 2 * head + 2]), keys.double().numpy(), values.numpy()


def reference(q, k, v, scaling, score, bias, values, budget):
    """Positions, biases and values of one head, step by step from the definitions."""
    scores = q @ k.T * scaling
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    by = {
        "rms": [math.sqrt(sum(w[j] ** 2 for w in weights) / len(q)) for j in range(len(k))],
        "mean": [sum(w[j] for w in weights) / len(q) for j in range(len(k))],
        "max": [max(w[j] for w in weights) for j in range(len(k))],
    }[score]
    chosen = sorted(sorted(range(len(k)), key=lambda j: (-by[j], j))[:budget])
    mass = np.exp(scores - scores.max()).mean(0)
    lower, upper = bias_bounds(len(k), budget)
    beta = np.zeros(budget)
    if bias == "redistribute":
        missing = max(0.0, mass.sum() - mass[chosen].sum())
        beta = np.array([min(max(math.log((mass[j] + missing / budget) / mass[j]), lower), upper) for j in chosen])
    elif bias == "nnls":
        columns = np.exp(scores - scores.max(1, keepdims=True))
        fitted = lsq_linear(columns[:, chosen], columns.sum(1), (math.exp(lower), math.exp(upper)), tol=1e-14)
        beta = np.log(fitted.x)
    new = v[chosen].astype(np.float64)
    if values == "least_squares":
        less = np.exp(scores[:, chosen] + beta)
        less /= less.sum(1, keepdims=True)
        new = new + np.linalg.lstsq(less, weights @ v - less @ new, rcond=None)[0]
        return chosen, beta, less @ new
    return chosen, beta, new


@pytest.mark.parametrize("values", ["direct", "least_squares"])
@pytest.mark.parametrize("bias", ["none", "redistribute", "nnls"])
@pytest.mark.parametrize("score", ["rms", "mean", "max"])
def test_each_step_is_its_definition(engine, cache, score, bias, values):
    settings = {"score": score, "bias": bias, "values": values, "nnls": "converged", "ridge": 1e-12}
    new = compact(engine, cache, "attention_matching", budgets="uniform", queries="context_prefill", **settings)
    scaling = engine.geometry.scaling
    for index, head, q, k, v in heads_of(engine, cache):
        keys, made, beta, positions = (t.double().numpy() for t in new.source(index, 0, TOKENS).head(head))
        chosen, biases, wanted = reference(q, k, v, scaling, score, bias, values, BUDGET)
        assert positions.tolist() == chosen
        np.testing.assert_allclose(beta, biases, atol=2e-3)
        np.testing.assert_array_equal(keys.astype(np.float32), k[chosen].astype(np.float32))
        if values == "direct":
            np.testing.assert_array_equal(made.astype(np.float32), wanted.astype(np.float32))
        else:  # what the queries read is unique, where values are not
            less = np.exp(q @ k[chosen].T * scaling + beta)
            np.testing.assert_allclose(less / less.sum(1, keepdims=True) @ made, wanted, atol=5e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("high_attn", {"keys": "highest_attention", "bias": "nnls", "values": "least_squares"}),
        ("high_attn_direct", {"keys": "highest_attention", "bias": "nnls", "values": "direct"}),
        ("high_attn_redist_direct", {"keys": "highest_attention", "bias": "redistribute", "values": "direct"}),
        ("two_pass", {"keys": "two_pass", "bias": "redistribute", "values": "direct"}),
        ("omp", {"keys": "omp", "bias": "nnls", "values": "least_squares"}),
    ],
)
def test_presets_are_names_for_settings(engine, cache, name, settings):
    common = {"budgets": "uniform", "queries": "context_prefill", "score": "rms", "nnls": "published"}
    spelled = compact(engine, cache, "attention_matching", **{**common, **settings, "ridge": 1e-6})
    named = compact(engine, cache, name)
    for index, _ in cache.full_layers:
        a, b = spelled.source(index, 0, TOKENS), named.source(index, 0, TOKENS)
        for part in ("keys", "values", "bias", "positions"):
            assert torch.equal(getattr(a, part), getattr(b, part))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("budgets", ["uniform", "global", "adakv", "pyramid"])
def test_budgets_are_met_exactly(engine, name, budgets):
    cache = engine.prefill(tiny_tokens(60), capture_seed=0)
    new = compact(engine, cache, name, budget=7, budgets=budgets)
    lengths = [new.source(index, 0, 60).lengths for index, _ in new.full_layers]
    assert sum(map(sum, lengths)) == 2 * 2 * 7
    assert min(map(min, lengths)) >= 1
    if budgets == "uniform":
        assert lengths == [(7, 7), (7, 7)]
    if budgets == "adakv":
        assert [sum(layer) for layer in lengths] == [14, 14]
    if budgets == "pyramid":
        assert sum(lengths[0]) > sum(lengths[1])
    for index, _ in new.full_layers:
        span = new.source(index, 0, 60)
        assert bool(torch.cat([span.keys, span.values, span.bias[:, None]], dim=1).isfinite().all())


@pytest.mark.parametrize("name", ["two_pass", "high_attn"])
def test_budgets_of_a_file(engine, name, tmp_path):
    cache = engine.prefill(tiny_tokens(60), capture_seed=0)
    path = tmp_path / "shares.json"
    path.write_text(json.dumps([[6, 1], [1, 2]]))
    new = compact(engine, cache, name, budget=10, budgets="file", budgets_file=str(path), shortlist=1.5)
    assert [new.source(index, 0, 60).lengths for index, _ in new.full_layers] == [(24, 4), (4, 8)]
    with pytest.raises(SettingsError, match="needs a budgets_file"):
        make_strategy(name, budgets="file")
    path.write_text("[[1, 1]]")
    with pytest.raises(BudgetError, match="1 layers"):
        compact(engine, cache, name, budgets="file", budgets_file=str(path))


@pytest.mark.parametrize("subset", ["random", "mahalanobis", "extremes", "mean"])
@pytest.mark.parametrize("name", ["high_attn", "two_pass"])
def test_subsets_of_the_queries(engine, name, subset):
    cache = engine.prefill(tiny_tokens(60), capture_seed=0)
    few = {"query_subset": subset, "subset_queries": 8}
    new, again = (compact(engine, cache, name, budget=15, **few) for _ in range(2))
    whole = compact(engine, cache, name, budget=15)
    spans = [[each.source(index, 0, 60) for index, _ in each.full_layers] for each in (new, again, whole)]
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(spans[0], spans[1], strict=True))
    assert not all(torch.equal(a.positions, b.positions) for a, b in zip(spans[0], spans[2], strict=True))


@pytest.mark.parametrize("queries", ["repeat_prefill", "self_study", "context_prefill+repeat_prefill+self_study"])
def test_mixed_queries(engine, queries):
    cache = engine.prefill(tiny_tokens(60), capture_seed=0)
    new = compact(engine, cache, "high_attn", budget=10, queries=queries, study_prompts=3, study_tokens=5)
    assert new.held_positions == 10
    assert new.metadata.reports[-1].compaction_tokens > 0
    again = compact(engine, cache, "high_attn", budget=10, queries=queries, study_prompts=3, study_tokens=5)
    for index, _ in new.full_layers:
        assert torch.equal(new.source(index, 0, 60).values, again.source(index, 0, 60).values)


def test_queries_that_do_not_exist():
    with pytest.raises(SettingsError, match="there are no queries 'repeat'; there are: context_prefill"):
        make_strategy("two_pass", queries="context_prefill+repeat")


def test_redistribution_carries_the_mean_mass(engine):
    """To 1e-3 where no cap binds."""
    cache = engine.prefill(tiny_tokens(80), capture_seed=0)
    new = compact(engine, cache, "high_attn_redist_direct", budget=40)
    for index, head, q, k, _ in heads_of(engine, cache):
        keys, _, beta, _ = (t.double().numpy() for t in new.source(index, 0, 80).head(head))
        if beta.max() < bias_bounds(80, 40)[1] - 1e-6:
            top = (q @ k.T).max() * engine.geometry.scaling
            whole = np.exp(q @ k.T * engine.geometry.scaling - top).sum(1).mean()
            kept = np.exp(q @ keys.T * engine.geometry.scaling + beta - top).sum(1).mean()
            assert kept == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("budgets", ["uniform", "global", "adakv"])
def test_on_policy_queries_are_those_behind_the_compacted_layers(kind, budgets):
    """The first layer's queries are those of the full cache; every later one's come from a compacted run."""
    engine = TransformersEngine(tiny_model(kind, num_hidden_layers=3, **_all_full(kind)))
    cache = engine.prefill(tiny_tokens(60), capture_seed=0)
    settings = {"queries": "repeat_prefill", "budgets": budgets}
    new = compact(engine, cache, "high_attn", budget=10, on_policy=True, **settings)
    off = compact(engine, cache, "high_attn", budget=10, **settings)
    first, *later = [index for index, _ in cache.full_layers]
    assert torch.allclose(new.source(first, 0, 60).values, off.source(first, 0, 60).values, atol=1e-4)
    for index in later:
        assert not torch.allclose(new.source(index, 0, 60).bias, off.source(index, 0, 60).bias, atol=1e-4)
    # Plain reference: compact layer by layer, each time reading the turn anew over what is compacted so far.
    from agentcompact.queries import reference_turns
    from agentcompact.strategies.base import Phases

    strategy = make_strategy("high_attn", **settings)
    request = CompactionRequest(engine, cache, 10)
    turns = reference_turns(["repeat_prefill"], engine, cache, 0, 60, 0)
    spans = [cache.source(index, 0, 60) for index, _ in cache.full_layers]
    counts = [list(new.source(index, 0, 60).lengths) for index, _ in cache.full_layers]
    for place, (index, _) in enumerate(cache.full_layers):
        captured = engine.capture(turns, 0, after=cache.replaced(spans, 0, 60))
        full = cache.source(index, 0, 60)
        spans[place] = strategy.compact_layer(place, full, captured.layer(index), counts, request, Phases())
        made = new.source(index, 0, 60)
        assert torch.equal(made.positions, spans[place].positions)
        assert torch.allclose(made.bias, spans[place].bias, atol=1e-3)
        assert torch.allclose(made.values, spans[place].values, atol=2e-2)


def _all_full(kind):
    return {"layer_types": ["full_attention"] * 3} if kind == "gemma3" else {}


def test_on_policy_leaves_what_is_around_a_span(engine):
    cache = engine.prefill(tiny_tokens(60), capture_seed=0)
    strategy = make_strategy("high_attn", queries="repeat_prefill", on_policy=True)
    new = strategy.compact(CompactionRequest(engine, cache, 5, start=10, stop=50)).cache
    assert new.held_positions == 25
    for index, _ in cache.full_layers:
        for part in ((0, 10), (50, 60)):
            assert torch.equal(new.source(index, *part).keys, cache.source(index, *part).keys)


def test_on_policy_needs_queries_of_its_own():
    with pytest.raises(SettingsError, match="read behind the cache"):
        make_strategy("high_attn", on_policy=True)


def test_default_queries_without_room_fall_back_with_a_warning(engine):
    """The model's context ends before the text could be repeated."""
    cache = engine.prefill(tiny_tokens(500), capture_seed=0)
    new = compact(engine, cache, "attention_matching", budget=20)
    (warning,) = new.metadata.reports[-1].warnings
    assert "the prefill's own queries were used" in warning
    assert new.held_positions == 20
    with pytest.raises(ContextLengthError, match="repeat-prefill needs room"):
        compact(engine, cache, "attention_matching", budget=20, queries="repeat_prefill")


@pytest.mark.parametrize("name", ["attention_matching", "high_attn", "omp", "two_pass", "high_attn_redist_direct"])
def test_held_out_errors_fall_with_the_ratio(name):
    """Averaged over documents, attention is read better at 4x than at 16x by queries that nothing was fitted to."""
    from agentcompact.evaluation.metrics.attention import HeldOutAttention

    engine = TransformersEngine(tiny_model("llama", initializer_range=0.1))
    errors = {4: 0.0, 16: 0.0}
    for seed in range(4):
        cache = engine.prefill(tiny_tokens(128, seed=seed), capture_seed=0)
        held_out = HeldOutAttention(engine, cache, [tiny_tokens(24, seed=100 + seed)], seed=0)
        for ratio in errors:
            found = held_out.compare(compact(engine, cache, name, budget=128 // ratio))
            errors[ratio] += found.output / 4
    assert errors[4] < errors[16]
