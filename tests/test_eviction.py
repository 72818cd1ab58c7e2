"""What every eviction method must keep to: its budget, the entries as they are, sinks, seeds, and any length."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import EngineSettings, TransformersEngine, compact, make_strategy, recompact
from agentcompact.errors import CapabilityError, SettingsError
from agentcompact.fitting.budgets import pyramid_budgets

NAMES = (
    "expected_attention",
    "h2o",
    "kvzip",
    "kvzip_plus",
    "pyramidkv",
    "random",
    "recent",
    "snapkv",
    "streaming_llm",
)
NEED_QUERIES = tuple(name for name in NAMES if name not in ("random", "recent", "streaming_llm"))
KINDS = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def engines():
    return {kind: TransformersEngine(tiny_model(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def caches(engines):
    return {
        (kind, count): engine.prefill(tiny_tokens(count), capture_seed=0)
        for kind, engine in engines.items()
        for count in (1, 2, 3, 40)
    }


def spans_of(cache):
    return [cache.source(index, 0, cache.next_position) for index, _ in cache.full_layers]


def lengths_of(cache):
    return [list(span.lengths) for span in spans_of(cache)]


def assert_kept_as_they_were(new, old):
    for span, original in zip(spans_of(new), spans_of(old), strict=True):
        for parts, whole in zip(span, original, strict=True):
            positions = parts[3].tolist()
            assert positions == sorted(set(positions))
            rows = [whole[3].tolist().index(position) for position in positions]
            for part, all_of_it in zip(parts, whole, strict=True):
                assert torch.equal(part, all_of_it[rows])


@pytest.mark.parametrize("ratio", [1, 2, 50])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_any_length_and_ratio(engines, caches, name, kind, count, ratio):
    engine, cache = engines[kind], caches[kind, count]
    budget = max(1, math.ceil(count / ratio))
    new = recompact(engine, cache, name, ratio=ratio)
    heads = 2 * len(new.full_layers)
    assert (new.next_position, new.tail_length) == (count, 0)
    assert new.entries == heads * budget
    assert min(map(min, lengths_of(new))) >= 1
    assert_kept_as_they_were(new, cache)
    grown = new.fork()
    assert torch.isfinite(engine.next_token_logits(grown, tiny_tokens(7, seed=1))).all()
    assert grown.next_position == count + 7
    again = recompact(engine, grown, name, ratio=4)  # compacted entries and a live tail together
    assert again.entries == heads * min(math.ceil((count + 7) / 4), budget + 7)
    assert again.next_position == count + 7
    assert_kept_as_they_were(again, grown)
    assert torch.isfinite(engine.next_token_logits(again, [5, 6])).all()


@pytest.mark.parametrize("name", NAMES)
def test_each_method_meets_its_own_budget_exactly(engines, name):
    cache = compact(engines["llama"], tiny_text(60), name, budget=7)
    lengths = lengths_of(cache)
    if name in ("kvzip", "kvzip_plus"):
        assert sum(map(sum, lengths)) == 4 * 7
        assert len({n for layer in lengths for n in layer}) > 1
    elif name == "pyramidkv":
        assert lengths == pyramid_budgets([[60, 60], [60, 60]], 7) == [[13, 13], [1, 1]]
    else:
        assert lengths == [[7, 7], [7, 7]]


@pytest.mark.parametrize("kind", ["uniform", "global", "adakv", "pyramid", "file"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_takes_every_kind_of_budget(engines, caches, name, kind, tmp_path):
    shares = tmp_path / "shares.json"
    shares.write_text(json.dumps([[3, 1], [2, 2]]))
    settings = {"budgets": kind, "budgets_file": str(shares) if kind == "file" else None}
    new = recompact(engines["llama"], caches["llama", 40], name, budget=10, **settings)
    lengths = lengths_of(new)
    assert sum(map(sum, lengths)) == 4 * 10
    if kind == "file":
        assert lengths == [[15, 5], [10, 10]]
    if kind == "uniform":
        assert lengths == [[10, 10], [10, 10]]
    if kind == "adakv":
        assert [sum(layer) for layer in lengths] == [20, 20]
    if kind == "pyramid":
        assert lengths == [[19, 19], [1, 1]]
    assert_kept_as_they_were(new, caches["llama", 40])
    smaller = recompact(engines["llama"], new, name, budget=3, **settings)  # of ragged heads
    assert smaller.entries <= 4 * 3
    assert kind in ("uniform", "adakv") or smaller.entries == 4 * 3
    assert torch.isfinite(engines["llama"].next_token_logits(smaller, [5])).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "recent"])
@pytest.mark.parametrize(("budget", "sinks"), [(10, 4), (2, 4), (7, 0), (5, 9)])
def test_sinks_are_kept(engines, caches, name, budget, sinks):
    new = recompact(engines["llama"], caches["llama", 40], name, budget=budget, sinks=sinks, budgets="uniform")
    for span in spans_of(new):
        for parts in span:
            assert parts[3][: min(sinks, budget)].tolist() == list(range(min(sinks, budget)))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_entries(engines, caches, name):
    a, b, other = (
        recompact(engines["llama"], caches["llama", 40], name, budget=8, seed=seed) for seed in (3, 3, 2**63 - 1)
    )
    assert all(torch.equal(x.positions, y.positions) for x, y in zip(spans_of(a), spans_of(b), strict=True))
    differs = any(not torch.equal(x.positions, y.positions) for x, y in zip(spans_of(a), spans_of(other), strict=True))
    assert differs == (name == "random")


def test_random_differs_from_head_to_head(engines, caches):
    span = spans_of(recompact(engines["llama"], caches["llama", 40], "random", budget=12))[0]
    assert span.head(0)[3].tolist() != span.head(1)[3].tolist()


def test_recent_and_windows(engines, caches):
    engine, cache = engines["llama"], caches["llama", 40]
    for parts in spans_of(recompact(engine, cache, "recent", budget=6))[0]:
        assert parts[3].tolist() == [34, 35, 36, 37, 38, 39]
    for parts in spans_of(recompact(engine, cache, "h2o", budget=9, recent=0.5, sinks=0))[1]:
        assert parts[3][-4:].tolist() == [36, 37, 38, 39]
    for parts in spans_of(recompact(engine, cache, "h2o", budget=9, recent=1, sinks=2))[1]:
        assert parts[3].tolist() == [0, 1, 33, 34, 35, 36, 37, 38, 39]
    for parts in spans_of(recompact(engine, cache, "snapkv", budget=12, window=6))[1]:
        assert parts[3][-6:].tolist() == [34, 35, 36, 37, 38, 39]
    for parts in spans_of(recompact(engine, cache, "snapkv", budget=10))[1]:  # less than its window
        assert parts[3].tolist() == [0, 1, 2, 3, 34, 35, 36, 37, 38, 39]


def test_snapkv_asks_for_its_window_alone_where_the_prefills_sample_lacks_it(engines):
    few = TransformersEngine(engines["llama"].model, EngineSettings(capture_bytes=35 * 2 * 4 * 16 * 4))
    cache = few.prefill(tiny_tokens(200), capture_seed=0)
    assert len(cache.captured) == 35
    new = recompact(few, cache, "snapkv", budget=60)
    assert new.metadata.reports[-1].compaction_tokens == 200
    whole = TransformersEngine(engines["llama"].model)
    expected = recompact(whole, whole.prefill(tiny_tokens(200), capture_seed=0), "snapkv", budget=60)
    for a, b in zip(spans_of(new), spans_of(expected), strict=True):
        assert torch.equal(a.positions, b.positions)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budgets", ["uniform", "global", "pyramid"])
def test_a_part_of_which_some_heads_kept_nothing(engines, name, budgets):
    engine = engines["llama"]
    live = engine.prefill(tiny_tokens(120), capture_seed=0)
    small = recompact(engine, live, "high_attn", budget=6)
    tried = 0
    for start in range(60, 120, 6):
        lengths = [n for index, _ in small.full_layers for n in small.source(index, start, 120).lengths]
        tried += min(lengths) == 0 < max(lengths)
        if max(lengths) == 0:
            continue
        again = recompact(engine, small, name, budget=1, start=start, budgets=budgets)
        assert again.next_position == 120
        assert torch.isfinite(engine.next_token_logits(again, [5, 6])).all()
    assert tried > 1


@pytest.mark.parametrize("name", NEED_QUERIES)
def test_engines_that_lack_something_are_refused_by_name(engines, name):
    engine = TransformersEngine(engines["llama"].model)
    cache = engine.prefill(tiny_tokens(20), capture_seed=0)
    needed = make_strategy(name).needs
    for lacking in needed:
        engine.capabilities = frozenset(needed - {lacking})
        with pytest.raises(CapabilityError, match=f"'{name}' needs an engine that {lacking}"):
            recompact(engine, cache, name, ratio=2)


@pytest.mark.parametrize("name", NAMES)
def test_methods_without_repeating_cost_no_pass(engines, caches, name):
    report = recompact(engines["llama"], caches["llama", 40], name, budget=8).metadata.reports[-1]
    assert (report.compaction_tokens > 0) == (name in ("kvzip", "kvzip_plus"))
    assert make_strategy(name).reads_prefill_queries == (name in NEED_QUERIES and name not in ("kvzip", "kvzip_plus"))


def test_enough_is_said_for_every_kind(engines, caches):
    for kind in ("uniform", "global", "adakv", "pyramid"):
        new = recompact(engines["llama"], caches["llama", 40], "snapkv", budget=40, budgets=kind)
        assert "nothing was compacted" in new.metadata.reports[-1].warnings[0]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("h2o", {"recent": 1.5}),
        ("h2o", {"sinks": -1}),
        ("snapkv", {"window": 0}),
        ("snapkv", {"pooling": 4}),
        ("expected_attention", {"epsilon": float("nan")}),
        ("expected_attention", {"future": 0}),
        ("kvzip", {"budgets": "magic"}),
    ],
    ids=str,
)
def test_values_that_a_setting_does_not_take(name, setting):
    (key,) = setting
    with pytest.raises(SettingsError, match=f"'{name}': {key}="):
        make_strategy(name, **setting)
