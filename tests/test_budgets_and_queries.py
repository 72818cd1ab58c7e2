"""Global budgets, repeat-prefill queries, and what happens when queries are few."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import (
    CompactionRequest,
    EngineSettings,
    TransformersEngine,
    compact,
    make_strategy,
    recompact,
)
from agentcompact.engines import question_ids
from agentcompact.errors import BudgetError, CacheError, ContextLengthError
from agentcompact.fitting.budgets import global_budgets


def reference_counts(scores, total):
    """The best of each head first, then the highest of the rest, one by one."""
    counts = {(layer, head): 1 for layer, heads in enumerate(scores) for head in range(len(heads))}
    rest = []
    for layer, heads in enumerate(scores):
        for head, row in enumerate(heads):
            row = row.tolist()
            row.remove(max(row))
            rest += [(value, layer, head) for value in row]
    for _, layer, head in sorted(rest, reverse=True)[: max(0, total - len(counts))]:
        counts[layer, head] += 1
    return [[counts[layer, head] for head in range(len(heads))] for layer, heads in enumerate(scores)]


@pytest.mark.parametrize("total", [3, 6, 7, 20, 43, 60, 100])
def test_global_budgets_are_one_ranking(total):
    torch.manual_seed(0)
    scores = [[torch.rand(n) * scale for n in (10, 7)] for scale in (1.0, 5.0, 0.01)]
    counts = global_budgets(scores, total)
    assert counts == reference_counts(scores, total)
    assert sum(map(sum, counts)) == max(6, min(total, 51))
    assert min(map(min, counts)) >= 1


@pytest.mark.parametrize("name", ["two_pass", "high_attn"])
@pytest.mark.parametrize("queries", ["context_prefill", "repeat_prefill"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_global_budgets_are_met_exactly(name, queries, kind):
    engine = TransformersEngine(tiny_model(kind))
    cache = compact(engine, tiny_text(60), name, ratio=6, budgets="global", queries=queries)
    layers = cache.full_layers
    assert cache.entries == len(layers) * 2 * 10
    lengths = [n for _, layer in layers for n in layer.span.lengths]
    assert len(set(lengths)) > 1 or kind == "gemma3"  # it has one full layer, whose two heads may share alike
    assert min(lengths) >= 1
    for _, layer in layers:
        assert torch.isfinite(layer.span.bias).all()
        assert torch.isfinite(layer.span.values).all()
    again = recompact(engine, cache, name, ratio=12, budgets="global")
    assert again.entries == len(layers) * 2 * 5
    assert torch.isfinite(engine.next_token_logits(again, [5, 6])).all()


def test_global_selection_keeps_the_highest_scores_of_all():
    engine = TransformersEngine(tiny_model("llama"))
    live = engine.prefill(tiny_tokens(40), capture_seed=0)
    kept = make_strategy("high_attn", budgets="global", bias="none", values="direct").compact(
        CompactionRequest(engine, live, 10)
    )
    scores = {}
    for index, _ in live.full_layers:
        span, captured = live.source(index, 0, 40), live.captured.layer(index)
        for head in range(2):
            queries = captured[2 * head : 2 * head + 2].reshape(-1, 16).double()
            weights = (queries @ span.head(head)[0].double().T * 0.25).softmax(-1)
            for position, value in enumerate(weights.square().mean(0).sqrt().tolist()):
                scores[index, head, position] = value
    chosen = {
        (index, head, int(position))
        for index, layer in kept.cache.full_layers
        for head in range(2)
        for position in layer.span.head(head)[3]
    }
    assert chosen == set(sorted(scores, key=scores.get, reverse=True)[:40])


def test_repeat_queries_are_those_of_request_and_text_behind_the_cache():
    """Compared with a plain forward of everything in one sequence."""
    engine = TransformersEngine(tiny_model("llama"))
    cache = compact(engine, tiny_text(50), "none", prompt="raw")
    ids = cache.token_ids
    from agentcompact.queries import repeat_prefill_queries

    store = repeat_prefill_queries(engine, cache, 0, len(ids), seed=0)
    request = question_ids(engine, cache.metadata.prompt, "Repeat the text above, word for word.")
    whole = engine.prefill([*ids, *request, *ids], capture_seed=0)
    expected = whole.captured.layer(1, len(ids))
    assert torch.allclose(store.layer(1), expected, atol=1e-4)
    assert engine.counters.compaction_tokens == len(request) + len(ids)
    assert cache.next_position == len(ids)


def test_repeat_in_chunks(monkeypatch):
    from agentcompact.queries import repeat_prefill

    monkeypatch.setattr(repeat_prefill, "CHUNK", 20)
    monkeypatch.setattr(repeat_prefill, "SMALLEST_CHUNK", 10)
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(50), capture_seed=0)
    asked = []
    monkeypatch.setattr(engine, "capture", lambda turns, *_, **__: asked.extend(turns))
    repeat_prefill.repeat_prefill_queries(engine, cache, 0, 50, seed=0)
    assert [turn[-20:] for turn in asked[:2]] == [tiny_tokens(50)[:20], tiny_tokens(50)[20:40]]
    assert asked[2][-10:] == tiny_tokens(50)[40:]


def test_repeat_without_room_is_refused_with_numbers():
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(480), capture_seed=0)
    with pytest.raises(ContextLengthError, match=r"480 tokens .* 512: use queries=context_prefill"):
        recompact(engine, cache, "two_pass", ratio=8, queries="repeat_prefill")


def test_no_room_for_any_query_is_said():
    engine = TransformersEngine(tiny_model("llama"), EngineSettings(capture_bytes=1))
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    with pytest.raises(CacheError, match="capture_bytes"):
        recompact(engine, cache, "two_pass", ratio=4)


def test_a_span_without_sampled_queries_gets_its_own():
    """A sample of four positions may miss a span altogether: then that span's queries are captured again."""
    model = tiny_model("llama")
    bytes_each = 2 * 4 * 16 * 4
    few = TransformersEngine(model, EngineSettings(capture_bytes=4 * bytes_each))
    cache = few.prefill(tiny_tokens(40), capture_seed=0)
    assert len(cache.captured) == 4
    small = recompact(few, cache, "two_pass", budget=2, start=30)
    assert small.metadata.reports[-1].compaction_tokens == 40
    for _, layer in small.full_layers:
        assert torch.isfinite(layer.span.bias).all()
        assert layer.span.lengths == (32, 32)


@pytest.mark.parametrize(("start", "stop"), [(-5, 40), (0, 50), (20, 20), (30, 10)])
def test_ranges_that_are_none_are_refused_before_any_work(start, stop):
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    with pytest.raises(BudgetError, match="no span of the cache's 40 tokens"):
        make_strategy("two_pass").compact(CompactionRequest(engine, cache, 4, start=start, stop=stop))


def test_a_stop_inside_the_compacted_span_leaves_what_is_behind_it():
    engine = TransformersEngine(tiny_model("llama"))
    cache = compact(engine, tiny_text(40), "two_pass", ratio=2)
    held = [cache.source(index, 20, 40) for index, _ in cache.full_layers]
    before = [cache.source(index, 0, 20).entries for index, _ in cache.full_layers]
    small = make_strategy("two_pass").compact(CompactionRequest(engine, cache, 4, start=0, stop=20)).cache
    assert (small.next_position, small.span_tokens) == (40, 40)
    for (index, _), old, entries in zip(small.full_layers, held, before, strict=True):
        now = small.source(index, 20, 40)
        assert torch.equal(now.keys, old.keys)
        assert torch.equal(now.bias, old.bias)
        assert small.source(index, 0, 20).entries == 8 < entries


def test_any_seed_works():
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    for seed in (2**40, 2**63 - 1):
        assert recompact(engine, cache, "two_pass", budget=2, seed=seed, first_pass_queries=5).entries == 8


def test_heads_without_scores_get_nothing():
    scores = [[torch.tensor([0.9, 0.1]), torch.empty(0)], [torch.empty(0), torch.tensor([0.5])]]
    assert global_budgets(scores, 2) == [[1, 0], [0, 1]]
    assert global_budgets(scores, 3) == [[2, 0], [0, 1]]


@pytest.mark.parametrize("name", ["two_pass", "high_attn"])
@pytest.mark.parametrize("budgets", ["uniform", "global"])
def test_a_part_of_which_some_heads_kept_nothing_can_be_compacted(name, budgets):
    """Positions from 183 on, of which the first compaction left some heads no entry."""
    engine = TransformersEngine(tiny_model("llama"))
    live = engine.prefill(tiny_tokens(200), capture_seed=0)
    small = recompact(engine, live, "two_pass", budget=8)
    tried = 0
    for start in range(150, 200, 3):
        lengths = [n for index, _ in small.full_layers for n in small.source(index, start, 200).lengths]
        tried += min(lengths) == 0 < max(lengths)
        again = recompact(engine, small, name, budget=1, start=start, budgets=budgets)
        assert again.next_position == 200
        assert torch.isfinite(engine.next_token_logits(again, [5, 6])).all()
    assert tried > 3


def test_captured_queries_of_a_part_do_not_stand_for_the_whole():
    """More tokens arrived without capture: their queries are captured before they are compacted."""
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(300), capture_seed=0)
    assert cache.captured.covers(0, 300)
    engine.next_token_logits(cache, tiny_tokens(100, seed=4))
    assert not cache.captured.covers(0, 400)
    assert not cache.captured.covers(300, 400)
    assert recompact(engine, cache, "two_pass", ratio=4).metadata.reports[-1].compaction_tokens == 400


def test_a_prefill_without_capture_keeps_what_was_captured():
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(40), capture_seed=0)
    engine.prefill(tiny_tokens(10, seed=4), cache)
    assert recompact(engine, cache, "two_pass", budget=4, stop=40).metadata.reports[-1].compaction_tokens == 0
