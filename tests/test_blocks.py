"""Compaction block by block, and of several documents."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import answer, compact, compact_many
from agentcompact.engines import TransformersEngine
from agentcompact.errors import BudgetError, ContextLengthError, DocumentError
from agentcompact.settings import EngineSettings
from agentcompact.strategies import CompactionRequest, compact_in_blocks, make_strategy

NAMES = ["two_pass", "high_attn", "streaming_llm"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request):
    return TransformersEngine(tiny_model(request.param))


def entries(cache):
    return [layer.all_entries() for _, layer in cache.full_layers]


@pytest.mark.parametrize("name", NAMES)
def test_one_block_is_the_whole(engine, name):
    ids = tiny_tokens(60)
    whole = make_strategy(name).compact(CompactionRequest(engine, engine.prefill(ids, capture_seed=0), 15)).cache
    block = compact_in_blocks(make_strategy(name), engine, ids, block=60, ratio=4)
    for a, b in zip(entries(whole), entries(block), strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.allclose(a.values, b.values, atol=1e-5)
        assert torch.allclose(a.bias, b.bias, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [64, 65, 90])
def test_blocks_compose_into_one_cache(engine, name, tokens):
    ids = tiny_tokens(tokens)
    cache = compact_in_blocks(make_strategy(name), engine, ids, block=32, ratio=4)
    sizes = [32] * (tokens // 32) + ([tokens % 32] if tokens % 32 else [])
    kept = sum(math.ceil(size / 4) for size in sizes)
    assert cache.next_position == tokens
    assert cache.token_ids == ids
    assert cache.held_positions == kept
    assert cache.captured is None
    for span in entries(cache):
        for _, _, bias, positions in span:
            assert bool(bias.isfinite().all())
            for number, size in enumerate(sizes):
                inside = (positions >= 32 * number) & (positions < 32 * number + size)
                assert int(inside.sum()) == math.ceil(size / 4)
    (report,) = cache.metadata.reports
    assert (report.blocks, report.tokens, report.budget) == (len(sizes), tokens, kept)
    assert report.entries_after == cache.entries
    assert report.entries_before == tokens * len(cache.full_layers) * 2
    logits = engine.next_token_logits(cache.fork(), [5, 6])
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize(("budget", "tokens"), [(10, 90), (7, 96), (1, 90), (50, 100)])
def test_a_budget_is_shared_by_the_blocks(engine, budget, tokens):
    cache = compact_in_blocks(make_strategy("streaming_llm"), engine, tiny_tokens(tokens), block=32, budget=budget)
    assert cache.held_positions == max(budget, math.ceil(tokens / 32))  # one entry a block at least


def test_what_is_held_is_bounded_by_the_block(monkeypatch):
    """At every compaction the cache holds what was kept of earlier blocks and one block; queries of one block only."""
    engine = TransformersEngine(tiny_model("llama"), EngineSettings(prefill_chunk=16))
    strategy = make_strategy("two_pass")
    held = []
    compact_span = type(strategy).compact

    def noted(self, request):
        held.append((request.cache.held_positions, len(request.cache.captured)))
        return compact_span(self, request)

    monkeypatch.setattr(type(strategy), "compact", noted)
    compact_in_blocks(strategy, engine, tiny_tokens(400), block=40, ratio=8)
    assert [positions for positions, _ in held] == [40 + 5 * number for number in range(10)]
    assert [queries for _, queries in held] == [40] * 10


def test_repeat_prefill_reads_a_block_again_behind_what_is_kept(engine):
    strategy = make_strategy("high_attn", queries="repeat_prefill", budgets="global")
    cache = compact_in_blocks(strategy, engine, tiny_tokens(96), block=32, ratio=4)
    assert cache.held_positions == 24
    assert cache.metadata.reports[0].compaction_tokens >= 96


def test_blocks_that_cannot_be(engine):
    with pytest.raises(BudgetError, match="a block of 8 tokens is too small"):
        compact_in_blocks(make_strategy("two_pass"), engine, tiny_tokens(60), block=8, ratio=4)
    with pytest.raises(ContextLengthError):
        compact_in_blocks(make_strategy("two_pass"), engine, tiny_tokens(600), block=100, ratio=4)
    with pytest.raises(BudgetError, match="ratio"):
        compact(engine, tiny_text(60), ratio=0.5, block=32)


def test_the_library_call_takes_a_block(engine):
    cache = compact(engine, tiny_text(100), "two_pass", ratio=4, block=32, document="words")
    assert cache.metadata.document == "words"
    assert cache.held_positions == 8 * 3 + 1
    assert answer(engine, cache, "w5 w6", max_new_tokens=3)


def test_several_documents(engine):
    texts = [tiny_text(40, seed=1), tiny_text(60, seed=2)]
    made = list(compact_many(engine, texts, "streaming_llm", documents=["a", "b"], ratio=4))
    assert [(cache.metadata.document, cache.next_position) for cache in made] == [("a", 40), ("b", 60)]
    with pytest.raises(DocumentError, match="document 2 is empty"):
        compact_many(engine, [texts[0], " "])
    with pytest.raises(DocumentError, match="2 texts have 1 names"):
        compact_many(engine, texts, documents=["a"])
