"""What every strategy must keep to, whatever the model, the length and the budget; and the registry."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

import agentcompact
from agentcompact import (
    CompactionRequest,
    Span,
    Strategy,
    StrategySettings,
    TransformersEngine,
    compact,
    make_strategy,
    recompact,
    register_strategy,
    strategy_names,
)
from agentcompact.errors import BudgetError, CapabilityError, SettingsError
from agentcompact.strategies import registry

BUILT_IN = ("high_attn", "none", "streaming_llm", "two_pass")
LEARNED = ("fast_diamond",)
"""Strategies that make new entries by what was trained for the model."""
KEEPING = [
    name
    for name in strategy_names()
    if not registry.strategy_class(name).rewrites and not registry.strategy_class(name).trains and name not in LEARNED
]
"""Strategies that keep entries of the text as they are; the others are tested in files of their own."""
UNIFORM = [name for name in KEEPING if getattr(make_strategy(name).settings, "budgets", "uniform") == "uniform"]
TENSORS = ("keys", "values", "bias", "positions")


@pytest.fixture(scope="module")
def engines():
    return {kind: TransformersEngine(tiny_model(kind)) for kind in ("llama", "qwen3", "gemma3")}


@pytest.fixture(scope="module")
def caches(engines):
    return {
        (kind, count): engine.prefill(tiny_tokens(count), capture_seed=0)
        for kind, engine in engines.items()
        for count in (1, 2, 3, 40)
    }


@pytest.fixture
def engine(engines):
    return engines["llama"]


@pytest.fixture
def own_registry(monkeypatch):
    """Undo what a test registers."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def spans_of(cache, start=0, stop=None):
    stop = cache.next_position if stop is None else stop
    return [cache.source(index, start, stop) for index, _ in cache.full_layers]


def assert_identical(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.offsets == y.offsets
        for name in TENSORS:
            assert torch.equal(getattr(x, name), getattr(y, name)), name


def test_the_built_in_strategies_are_there():
    assert set(BUILT_IN) <= set(strategy_names())
    for name in strategy_names():
        assert registry.strategy_class(name).name == name
        assert registry.strategy_class(name).summary


@pytest.mark.parametrize("ratio", [1, 2, 50])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", KEEPING)
def test_budget_positions_and_the_next_forward(engines, caches, name, kind, count, ratio):
    engine, cache = engines[kind], caches[kind, count]
    new = recompact(engine, cache, name, ratio=ratio)
    wanted = count if name == "none" else max(1, math.ceil(count / ratio))
    assert new.next_position == count
    assert new.tail_length == 0
    assert new.held_positions == wanted
    originals = spans_of(cache)
    for span, original in zip(spans_of(new), originals, strict=True):
        assert span.lengths == (wanted, wanted) or name not in UNIFORM
        assert min(span.lengths) >= 1
        for tensor in (span.keys, span.values, span.bias):
            assert torch.isfinite(tensor).all()
        for (keys, _, _, positions), (all_keys, _, _, all_positions) in zip(span, original, strict=True):
            assert positions.tolist() == sorted(set(positions.tolist()))
            rows = [all_positions.tolist().index(position) for position in positions.tolist()]
            assert torch.equal(keys, all_keys[rows])  # every strategy here keeps original keys
    report = new.metadata.reports[-1]
    layers = len(new.full_layers)
    assert (report.strategy, report.tokens) == (name, count)
    assert report.entries_before == layers * 2 * count
    assert report.entries_after == layers * 2 * wanted == new.entries
    logits = engine.next_token_logits(new.fork(), tiny_tokens(2, seed=1))
    assert logits.shape == (2, 128)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_none_answers_as_the_full_cache(engines, caches, kind):
    new = recompact(engines[kind], caches[kind, 40], "none", ratio=50)
    question = tiny_tokens(5, seed=1)
    expected = engines[kind].next_token_logits(caches[kind, 40].fork(), question)
    torch.testing.assert_close(engines[kind].next_token_logits(new, question), expected, rtol=1e-4, atol=1e-4)


def output_error(cache, new):
    """Mean square of the difference in what the captured queries read from the two caches."""
    errors = []
    for index, _ in cache.full_layers:
        queries = cache.captured.layer(index)
        outputs = []
        for source in (cache, new):
            heads = [
                torch.softmax(queries[2 * h : 2 * h + 2] @ keys.T / 4 + bias, dim=-1) @ values
                for h, (keys, values, bias, _) in enumerate(source.source(index, 0, source.next_position))
            ]
            outputs.append(torch.cat(heads))
        errors.append(float((outputs[0] - outputs[1]).square().mean()))
    return sum(errors)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_more_entries_are_nearer_to_the_full_cache_and_fitted_values_nearer_still(engines, caches, kind):
    """Guards against entries that are finite and meaningless."""
    cache = caches[kind, 40]

    def error(name, ratio, **settings):
        return output_error(cache, recompact(engines[kind], cache, name, ratio=ratio, **settings))

    assert error("none", 4) == 0
    for name in ("two_pass", "high_attn"):
        assert error(name, 1.25) < error(name, 4) < error(name, 20)
    for ratio in (2, 4, 10):
        assert error("high_attn", ratio) < error("high_attn", ratio, values="direct")
        assert error("high_attn", ratio) < error("streaming_llm", ratio)


@pytest.mark.parametrize("name", KEEPING)
def test_sliding_layers_keep_their_window(engines, name):
    engine = engines["gemma3"]
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    new = recompact(engine, cache, name, ratio=8)
    assert [index for index, _ in new.full_layers] == [1]
    for index in (0, 2):
        old_layer, new_layer = cache.layers[index], new.layers[index]
        assert new_layer.is_sliding
        assert (new_layer.length, new_layer.before) == (15, 25)  # the window of 16 counts the query itself
        for part in ("keys", "values"):
            old, kept = (getattr(layer.tail, part)[:, :, : layer.length] for layer in (old_layer, new_layer))
            assert torch.equal(old, kept)
    assert sum(new.layers[1].span.lengths) == (80 if name == "none" else 10)


@pytest.mark.parametrize(("budget", "sinks"), [(10, 4), (4, 4), (2, 4), (1, 4), (7, 0), (39, 4), (5, 9)])
def test_streaming_llm_keeps_sinks_and_recent(engine, budget, sinks):
    cache = engine.prefill(tiny_tokens(40))
    worked = engine.counters.compaction_tokens
    new = recompact(engine, cache, "streaming_llm", budget=budget, sinks=sinks)
    first = min(sinks, budget)
    rows = [*range(first), *range(40 - (budget - first), 40)]
    assert len(rows) == budget
    for span, original in zip(spans_of(new), spans_of(cache), strict=True):
        for head in range(2):
            keys, values, bias, positions = span.head(head)
            assert positions.tolist() == rows
            assert torch.equal(keys, original.head(head)[0][rows])
            assert torch.equal(values, original.head(head)[1][rows])
            assert not bias.any()
    assert engine.counters.compaction_tokens == worked


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("budget", [40, 1000])
def test_a_budget_that_holds_everything_changes_nothing(engine, name, budget):
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    new = recompact(engine, cache, name, budget=budget)
    assert_identical(spans_of(new), spans_of(cache))
    assert new.next_position == 40
    warnings = new.metadata.reports[-1].warnings
    if name == "none":
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert "nothing was compacted" in warnings[0]
        assert f"{budget:,}" in warnings[0]
        assert "40" in warnings[0]
    question = tiny_tokens(3, seed=1)
    expected = engine.next_token_logits(cache.fork(), question)
    torch.testing.assert_close(engine.next_token_logits(new, question), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "amount",
    [
        {"budget": 0},
        {"budget": -3},
        {"ratio": float("nan")},
        {"ratio": float("inf")},
        {"ratio": 0.5},
        {"ratio": 0},
        {"ratio": -2},
        {"ratio": 2, "budget": 5},
        {"ratio": 2, "budget": 0},
    ],
    ids=str,
)
def test_budgets_that_cannot_be_met(engine, amount):
    with pytest.raises(BudgetError):
        compact(engine, tiny_text(20), **amount)
    cache = engine.prefill(tiny_tokens(20), capture_seed=0)
    with pytest.raises(BudgetError):
        recompact(engine, cache, **amount)
    assert not cache.is_compacted


@pytest.mark.parametrize("name", [name for name in strategy_names() if name not in LEARNED])
def test_requests_that_cannot_be_met(engine, name):
    cache = engine.prefill(tiny_tokens(20), capture_seed=0)
    for wrong in (
        {"budget": 0},
        {"budget": 5, "start": 10, "stop": 10},
        {"budget": 5, "start": 12, "stop": 10},
    ):
        with pytest.raises(BudgetError):
            make_strategy(name).compact(CompactionRequest(engine=engine, cache=cache, **wrong))
    with pytest.raises(BudgetError):
        make_strategy(name).compact(CompactionRequest(engine=engine, cache=engine.new_cache(), budget=5))


def test_eight_to_one_is_the_default(engine):
    cache = compact(engine, tiny_text(33))
    assert cache.held_positions == math.ceil(33 / 8)
    assert cache.metadata.reports[-1].strategy == "attention_matching"


def test_an_unknown_strategy_names_the_nearest(engine):
    with pytest.raises(SettingsError, match="no strategy 'two_pas', did you mean 'two_pass'"):
        make_strategy("two_pas")
    with pytest.raises(SettingsError, match="high_attn"):
        compact(engine, tiny_text(20), strategy="zzz", ratio=2)


def test_an_unknown_setting_names_the_nearest(engine):
    with pytest.raises(SettingsError, match="'two_pass' has no setting 'shortlst', did you mean 'shortlist'"):
        make_strategy("two_pass", shortlst=3)
    with pytest.raises(SettingsError, match="did you mean 'sinks'"):
        compact(engine, tiny_text(20), strategy="streaming_llm", ratio=2, sink=3)
    with pytest.raises(SettingsError, match="no setting 'anything'"):
        make_strategy("none", anything=1)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("two_pass", {"shortlist": 0.5}),
        ("two_pass", {"shortlist": float("nan")}),
        ("two_pass", {"first_pass_queries": 0}),
        ("two_pass", {"bias": "magic"}),
        ("high_attn", {"ridge": 0.0}),
        ("high_attn", {"score": "median"}),
        ("streaming_llm", {"sinks": -1}),
    ],
    ids=str,
)
def test_values_that_a_setting_does_not_take(name, setting):
    (key,) = setting
    with pytest.raises(SettingsError, match=f"'{name}': {key}="):
        make_strategy(name, **setting)


def test_a_strategy_object_has_its_settings_already():
    strategy = make_strategy("streaming_llm", sinks=2)
    assert make_strategy(strategy) is strategy
    with pytest.raises(SettingsError):
        make_strategy(strategy, sinks=3)


class EveryOtherSettings(StrategySettings):
    offset: int = 0


class EveryOther(Strategy):
    """Keeps evenly spread entries."""

    name = "every_other"
    summary = "evenly spread entries"
    settings_type = EveryOtherSettings

    def compact_spans(self, request, spans, phases, report):
        with phases.phase("selection"):
            report.warnings.append("made by hand")
            return [
                Span.from_heads([
                    tuple(part[self.settings.offset :: 2][: request.budget] for part in head) for head in span
                ])
                for span in spans
            ]  # fmt: skip


@pytest.mark.usefixtures("own_registry")
def test_a_strategy_of_ones_own(engine):
    assert register_strategy(EveryOther) is EveryOther
    assert register_strategy(EveryOther) is EveryOther  # again changes nothing
    assert "every_other" in strategy_names()
    cache = agentcompact.compact(engine, tiny_text(40), strategy="every_other", budget=20, offset=1)
    assert cache.next_position == 40
    for span in spans_of(cache):
        assert span.head(1)[3].tolist() == list(range(1, 40, 2))
    report = cache.metadata.reports[-1]
    assert (report.strategy, report.settings, report.warnings) == (
        "every_other",
        {"offset": 1},
        ["made by hand"],
    )
    assert "selection" in report.seconds
    with pytest.raises(SettingsError, match="did you mean 'every_other'"):
        make_strategy("every_oter")


@pytest.mark.usefixtures("own_registry")
def test_a_second_class_of_that_name_is_refused():
    register_strategy(EveryOther)
    second = type("Second", (EveryOther,), {})
    with pytest.raises(SettingsError, match="every_other"):
        register_strategy(second)
    assert registry.strategy_class("every_other") is EveryOther


@pytest.mark.usefixtures("own_registry")
def test_a_class_under_a_built_in_name_is_refused():
    with pytest.raises(SettingsError, match="two_pass"):
        register_strategy(type("Mine", (EveryOther,), {"name": "two_pass"}))
    assert registry.strategy_class("two_pass") is not EveryOther


def test_an_engine_without_queries_is_refused_by_name(engines):
    engine = TransformersEngine(engines["llama"].model)
    engine.capabilities = frozenset()
    cache = engine.prefill(tiny_tokens(20), capture_seed=0)
    for name in ("two_pass", "high_attn"):
        with pytest.raises(CapabilityError, match=name):
            recompact(engine, cache, name, ratio=2)
    assert recompact(engine, cache, "streaming_llm", ratio=2).held_positions == 10


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", KEEPING)
def test_the_requests_cache_stays_as_it_was(engines, name, kind):
    engine = engines[kind]
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    question = tiny_tokens(3, seed=1)
    before = engine.next_token_logits(cache.fork(), question)
    entries = [Span(*(getattr(s, n).clone() for n in TENSORS), s.offsets) for s in spans_of(cache)]
    new = recompact(engine, cache, name, ratio=8)
    engine.next_token_logits(new, tiny_tokens(60, seed=2))  # nor does what the new cache does reach it
    assert not cache.is_compacted
    assert cache.next_position == 40
    assert cache.token_ids == tiny_tokens(40)
    assert cache.metadata.reports == []
    assert_identical(spans_of(cache), entries)
    assert torch.equal(engine.next_token_logits(cache.fork(), question), before)


@pytest.mark.parametrize("name", KEEPING)
def test_the_new_cache_is_not_reached_by_the_old_one(engine, name):
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    new = recompact(engine, cache, name, ratio=2)
    question = tiny_tokens(3, seed=1)
    before = engine.next_token_logits(new.fork(), question)
    cache.truncate(20)
    engine.next_token_logits(cache, tiny_tokens(15, seed=2))  # fits where the forgotten tokens were
    assert torch.equal(engine.next_token_logits(new.fork(), question), before)


@pytest.mark.parametrize("name", KEEPING)
def test_a_span_inside_leaves_what_is_around_it(engine, name):
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    new = recompact(engine, cache, name, budget=5, start=4, stop=30)
    assert (new.next_position, new.span_tokens, new.tail_length) == (40, 30, 10)
    middle = 26 if name == "none" else 5
    for span, original in zip(spans_of(new), spans_of(cache), strict=True):
        assert span.lengths == (4 + middle + 10,) * 2 or name not in UNIFORM
        for head in range(2):
            new_parts, old_parts = span.head(head), original.head(head)
            positions = new_parts[3].tolist()
            assert positions[:4] == [0, 1, 2, 3]
            assert positions[-10:] == list(range(30, 40))
            assert all(4 <= position < 30 for position in positions[4:-10])
            assert positions == sorted(set(positions))
            for new_part, old_part in zip(new_parts, old_parts, strict=True):
                assert torch.equal(new_part[:4], old_part[:4])
                assert torch.equal(new_part[-10:], old_part[-10:])
            assert not new_parts[2][:4].any()
            assert not new_parts[2][-10:].any()
    report = new.metadata.reports[-1]
    assert (report.tokens, report.entries_before, report.entries_after) == (26, 4 * 26, 4 * middle)
    logits = engine.next_token_logits(new, tiny_tokens(2, seed=1))
    assert torch.isfinite(logits).all()
    assert new.next_position == 42


@pytest.mark.parametrize("name", ["two_pass", "high_attn"])
def test_a_span_is_compacted_by_its_own_queries(engine, name):
    """Whatever follows the span in the cache has no say in what is kept of it."""
    long = engine.prefill(tiny_tokens(40), capture_seed=0)
    short = engine.prefill(tiny_tokens(30), capture_seed=0)
    a, b = (recompact(engine, cache, name, budget=5, start=4, stop=30) for cache in (long, short))
    for x, y in zip(spans_of(a, 4, 30), spans_of(b, 4, 30), strict=True):
        assert torch.equal(x.positions, y.positions)
        torch.testing.assert_close(x.bias, y.bias, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(x.values, y.values, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["two_pass", "high_attn"])
def test_queries_that_were_not_captured_are_recomputed(engine, name):
    ids = tiny_tokens(40)
    with_queries, without = engine.prefill(ids, capture_seed=0), engine.prefill(ids)
    assert without.captured is None
    a, b = (recompact(engine, cache, name, ratio=4) for cache in (with_queries, without))
    assert a.metadata.reports[-1].compaction_tokens == 0
    assert b.metadata.reports[-1].compaction_tokens == 40
    for x, y in zip(spans_of(a), spans_of(b), strict=True):
        assert torch.equal(x.positions, y.positions)
        torch.testing.assert_close(x.bias, y.bias, rtol=1e-3, atol=1e-3)
