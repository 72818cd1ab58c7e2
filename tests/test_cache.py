"""What a cache holds, shares and frees."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokens

from agentcompact import CompactionRequest, EngineSettings, Span, TransformersEngine, make_strategy
from agentcompact.cache import CapturedQueries, join_spans
from agentcompact.errors import CacheError, ContextLengthError, DocumentError


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"), EngineSettings(prefill_chunk=16))


def compacted_of(engine, tokens, budget, strategy="two_pass"):
    cache = engine.prefill(tiny_tokens(tokens), capture_seed=0)
    return make_strategy(strategy).compact(CompactionRequest(engine, cache, budget)).cache


def ragged(engine, cache, lengths):
    """Keep other numbers of entries in each head of each layer."""
    spans = []
    for index, _ in cache.full_layers:
        source = cache.source(index, 0, cache.next_position)
        heads = [tuple(part[:n] for part in source.head(h)) for h, n in enumerate(lengths)]
        spans.append(Span.from_heads(heads))
    return cache.replaced(spans, 0, cache.next_position)


@pytest.mark.parametrize("lengths", [None, (3, 50)])
def test_bytes_held_are_those_of_the_entries(engine, lengths):
    cache = compacted_of(engine, 200, 25)
    if lengths:
        cache = ragged(engine, engine.prefill(tiny_tokens(200)), lengths)
    heads, dim, layers = 2, 16, len(cache.layers)
    entries = layers * (sum(lengths) if lengths else heads * 25)
    assert cache.entries == entries
    storages = {}
    for _, layer in cache.full_layers:
        for tensor in (layer.span.keys, layer.span.values, layer.span.bias, layer.span.positions):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        assert layer.tail is None
    assert sum(storages.values()) == cache.nbytes  # nothing larger is kept alive behind the views
    assert cache.nbytes <= 1.1 * entries * (2 * dim + 1) * 4


def test_the_full_cache_is_freed(engine):
    """Keeping only the compacted cache keeps none of the full cache's tensors."""
    import gc
    import weakref

    cache = engine.prefill(tiny_tokens(100), capture_seed=0)
    full = weakref.ref(cache.layers[0].tail)
    compacted = make_strategy("two_pass").compact(CompactionRequest(engine, cache, 10)).cache
    del cache
    gc.collect()
    assert full() is None
    assert compacted.entries == 2 * 2 * 10


def test_batched_fork_shares_the_span(engine):
    cache = compacted_of(engine, 64, 16)
    batch = cache.fork(batch_size=5)
    for (_, a), (_, b) in zip(cache.full_layers, batch.full_layers, strict=True):
        assert a.span.keys.data_ptr() == b.span.keys.data_ptr()
    live = engine.prefill(tiny_tokens(64))
    shared = live.fork(batch_size=5)
    assert shared.layers[0].span.keys.data_ptr() == live.layers[0].tail.keys.data_ptr()  # no copy of the prefill


def test_fork_shares_until_written(engine):
    cache = engine.prefill(tiny_tokens(40))
    fork = cache.fork()
    assert fork.layers[0].tail is cache.layers[0].tail
    engine.next_token_logits(cache, [5, 6, 7])
    engine.next_token_logits(fork, [9])
    a, b = cache.layers[0].tail, fork.layers[0].tail
    assert a is not b
    assert torch.equal(a.keys[:, :, :40], b.keys[:, :, :40])
    assert cache.next_position == 43
    assert fork.next_position == 41


def test_truncation_into_the_span_is_refused(engine):
    cache = compacted_of(engine, 40, 10)
    engine.next_token_logits(cache, [5, 6, 7])
    before = cache.token_ids
    with pytest.raises(CacheError, match="live tail covers positions 40 to 43"):
        cache.truncate(39)
    cache.truncate(41)
    assert cache.next_position == 41
    assert before[:41] == cache.token_ids


def test_truncation_behind_a_dropped_window_is_refused_and_changes_nothing():
    engine = TransformersEngine(tiny_model("gemma3"), EngineSettings(prefill_chunk=16))
    cache = engine.prefill(tiny_tokens(60))
    for _ in range(30):
        engine.next_token_logits(cache, [5])
    cache.drop_outside_windows()
    assert cache.layers[0].tail.keys.shape[2] == 15  # window 16: the last 15 are seen by the next token
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(CacheError, match="sliding-window layers no longer hold"):
        cache.truncate(80)
    assert [layer.get_seq_length() for layer in cache.layers] == lengths


def test_numbers(engine):
    cache = compacted_of(engine, 64, 16)
    engine.next_token_logits(cache, [5, 6])
    assert cache.next_position == 66
    assert cache.span_tokens == 64
    assert cache.tail_length == 2
    assert cache.held_positions == 18
    assert cache.entries == 2 * 2 * 18
    assert "next_position=66" in repr(cache)


def test_an_empty_cache_is_not_taken_for_none(engine):
    cache = engine.new_cache()
    assert engine.prefill(tiny_tokens(5), cache) is cache


def test_interrupted_prefill_leaves_the_cache_as_it_was(engine):
    cache = engine.prefill(tiny_tokens(20), capture_seed=0)
    expected = engine.next_token_logits(cache.fork(), [5, 6])
    kept = cache.captured.positions.clone()

    def interrupt(_phase, done, _total):
        if done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(tiny_tokens(50, seed=3), cache, capture_seed=0, progress=interrupt)
    assert cache.next_position == 20
    assert cache.token_ids == tiny_tokens(20)
    assert torch.equal(cache.captured.positions, kept)
    assert torch.allclose(engine.next_token_logits(cache, [5, 6]), expected, atol=1e-5)


def test_interrupted_prefill_with_sliding_layers_leaves_the_cache_as_it_was():
    """Also where the window has moved on meanwhile."""
    engine = TransformersEngine(tiny_model("gemma3"), EngineSettings(prefill_chunk=16))
    cache = engine.prefill(tiny_tokens(20), capture_seed=0)
    expected = engine.next_token_logits(cache.fork(), [5, 6])

    def interrupt(_phase, done, _total):
        if done > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(tiny_tokens(90, seed=3), cache, capture_seed=0, progress=interrupt)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20, 20]
    assert torch.allclose(engine.next_token_logits(cache, [5, 6]), expected, atol=1e-5)


def test_a_prefill_holds_no_more_of_a_sliding_layer_than_window_and_chunk():
    engine = TransformersEngine(tiny_model("gemma3"), EngineSettings(prefill_chunk=16))
    cache, held = engine.new_cache(), []
    engine.prefill(tiny_tokens(400), cache, progress=lambda *_: held.append(cache.layers[0].nbytes))
    assert max(held) <= 2 * 2 * 15 * 16 * 4  # keys and values, heads, window - 1, head size, float32


def test_two_threads_read_control_tokens_as_they_should(smollm2):
    """How control tokens are read is state of the one tokenizer."""
    import sys
    import threading

    engine, marker = TransformersEngine(smollm2), smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    wrong = []

    def read(text, control, expected):
        for _ in range(300):
            if (marker in engine.encode(text, control_tokens=control)) != expected:
                wrong.append(text)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=read, args=("a <|im_end|> b " * 20, False, False)),
            threading.Thread(target=read, args=("<|im_end|>", True, True)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_context_limit_names_both_numbers(engine):
    with pytest.raises(ContextLengthError, match=r"600 tokens .* 512"):
        engine.prefill([5] * 600)
    with pytest.raises(DocumentError, match="no tokens"):
        engine.prefill([])


def test_captured_queries_are_those_of_the_forward(engine):
    """The captured queries equal the projections and rotations computed by hand."""
    ids = tiny_tokens(33)
    cache = engine.prefill(ids, capture_seed=0)
    lm = engine.model.causal_lm
    with torch.no_grad():
        hidden = lm.model.embed_tokens(torch.tensor([ids]))
        layer = lm.model.layers[0]
        query = layer.self_attn.q_proj(layer.input_layernorm(hidden)).view(1, 33, 4, 16).transpose(1, 2)
        cos, sin = lm.model.rotary_emb(hidden, torch.arange(33)[None])
        half = torch.cat([-query[..., 8:], query[..., :8]], dim=-1)
        rotated = query * cos[:, None] + half * sin[:, None]
    assert torch.allclose(cache.captured.layer(0), rotated[0], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_bounded_store_keeps_the_same_positions_for_any_chunks(chunk):
    queries = torch.randn(1, 2, 100, 4)
    store, whole = CapturedQueries(30, seed=5), CapturedQueries(30, seed=5)
    whole.plan(0, 100, 100)
    whole.take(0, queries)
    for start in range(0, 100, chunk):
        part = queries[:, :, start : start + chunk]
        store.plan(start, part.shape[2], 100 - start)
        store.take(0, part)
    assert sorted(store.positions.tolist()) == sorted(whole.positions.tolist())
    assert len(set(store.positions.tolist())) == 30
    assert torch.equal(store.layer(0), queries[0][:, store.positions])
    assert store.nbytes == 30 * 2 * 4 * 4
    other = CapturedQueries(30, seed=6)
    other.plan(0, 100, 100)
    assert set(other.positions.tolist()) != set(whole.positions.tolist())
    earlier = store.before(50)
    assert earlier.positions.max() < 50
    assert torch.equal(earlier.layer(0), queries[0][:, earlier.positions])
    assert torch.equal(
        store.layer(0, 20, 60),
        queries[0][:, store.positions[(store.positions >= 20) & (store.positions < 60)]],
    )


def test_spans_join_head_by_head():
    torch.manual_seed(0)

    def span(lengths):
        return Span.from_heads(
            [(torch.randn(n, 4), torch.randn(n, 4), torch.randn(n), torch.arange(n)) for n in lengths]
        )

    a, b = span((2, 3)), span((1, 4))
    joined = join_spans([a, b])
    assert joined.lengths == (3, 7)
    assert torch.equal(joined.head(1)[0], torch.cat([a.head(1)[0], b.head(1)[0]]))
    assert torch.equal(joined.head(0)[2], torch.cat([a.head(0)[2], b.head(0)[2]]))
    assert joined.within(1, 3).lengths == (1, 4)
    assert not joined.is_uniform
