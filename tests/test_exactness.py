"""An uncompacted cache, and a span that holds every entry, behave as plain transformers does."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny_model
from transformers import DynamicCache

from agentcompact import CompactionRequest, EngineSettings, TransformersEngine, make_strategy
from agentcompact.settings import SamplingSettings

SLIDING_QWEN2 = {
    "use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]
}  # fmt: skip
KINDS = {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "gemma3": {}, "qwen2-sliding": SLIDING_QWEN2}
TOLERANCE = 1e-4
TOKENS, SPLIT = 60, 40


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """(engine, token ids, logits of plain transformers)."""
    return plain_reference(tiny_model(request.param.split("-")[0], **KINDS[request.param]), TOKENS)


def plain_reference(model, tokens):
    """Run plain transformers attention before the engine changes the implementation."""
    torch.manual_seed(1)
    ids = torch.randint(5, 100, (tokens,)).tolist()
    lm = model.causal_lm
    lm.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0].float()
    return TransformersEngine(model, EngineSettings(prefill_chunk=16)), ids, logits


def plain_answer(model, ids, count):
    """Greedy tokens of plain transformers, one token at a time over a DynamicCache."""
    lm = model.causal_lm
    lm.set_attn_implementation("sdpa")
    cache, out, step = DynamicCache(config=lm.config), [], torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            token = int(lm(step, cache=cache).logits[0, -1].argmax())
            out.append(token)
            step = torch.tensor([[token]])
    lm.set_attn_implementation("agentcompact")
    return out


def close(a, b):
    return (a - b).abs().max().item() < TOLERANCE


def test_live_cache_with_chunked_prefill(case):
    engine, ids, logits = case
    cache = engine.prefill(ids[:SPLIT])
    assert close(engine.next_token_logits(cache, ids[SPLIT:]), logits[SPLIT:])
    assert cache.next_position == TOKENS


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunk_size_does_not_matter(case, chunk):
    engine, ids, logits = case
    other = TransformersEngine(engine.model, EngineSettings(prefill_chunk=chunk))
    cache = other.prefill(ids[:SPLIT])
    assert close(other.next_token_logits(cache, ids[SPLIT:]), logits[SPLIT:])


def test_span_of_all_entries(case):
    engine, ids, logits = case
    cache = engine.prefill(ids[:SPLIT])
    compacted = make_strategy("none").compact(CompactionRequest(engine, cache, SPLIT)).cache
    assert compacted.is_compacted
    assert compacted.tail_length == 0
    assert close(engine.next_token_logits(compacted, ids[SPLIT : SPLIT + 5]), logits[SPLIT : SPLIT + 5])
    assert close(engine.next_token_logits(compacted, ids[SPLIT + 5 :]), logits[SPLIT + 5 :])


def test_fork_and_truncate(case):
    engine, ids, logits = case
    cache = engine.prefill(ids[:SPLIT])
    compacted = make_strategy("none").compact(CompactionRequest(engine, cache, SPLIT)).cache
    for parent in (cache, compacted):
        fork, other = parent.fork(), copy.deepcopy(parent)
        engine.next_token_logits(fork, [7] * 9)
        assert close(engine.next_token_logits(parent, ids[SPLIT:50]), logits[SPLIT:50])
        fork.truncate(SPLIT)
        assert close(engine.next_token_logits(fork, ids[SPLIT:50]), logits[SPLIT:50])
        assert close(engine.next_token_logits(other, ids[SPLIT:]), logits[SPLIT:])
        parent.truncate(45)
        assert close(engine.next_token_logits(parent, ids[45:]), logits[45:])
        assert close(engine.next_token_logits(fork, ids[50:]), logits[50:])


@pytest.mark.parametrize("compacted", [False, True])
def test_batched_questions_of_different_lengths(case, compacted):
    engine, ids, _ = case
    cache = engine.prefill(ids[:SPLIT])
    if compacted:
        cache = make_strategy("none").compact(CompactionRequest(engine, cache, SPLIT)).cache
    prompts = [ids[40:41], ids[41:50], ids[50:60], ids[30:33]]
    expected = [plain_answer(engine.model, ids[:SPLIT] + prompt, 12) for prompt in prompts]
    engine.model.causal_lm.generation_config.eos_token_id = None
    made = engine.decode(cache.fork(len(prompts)), prompts, SamplingSettings(max_new_tokens=12))
    eos = engine.model.tokenizer.eos_token_id
    for answer, tokens in zip(made, expected, strict=True):
        wanted = tokens[: tokens.index(eos)] if eos in tokens else tokens
        assert answer.token_ids == wanted
    assert cache.next_position == SPLIT


def test_batched_logits_match_single_ones(case):
    """The padded batch gives each row the logits it has alone, not only the same choice."""
    engine, ids, _ = case
    cache = engine.prefill(ids[:SPLIT])
    shared = cache.fork(batch_size=3)
    prompts = [ids[40:42], ids[42:49], ids[49:53]]
    together = engine.read_prompts(shared, prompts)
    for row, prompt in zip(together.logits, prompts, strict=True):
        alone = engine.next_token_logits(cache.fork(), prompt)[-1]
        assert close(row, alone)


@pytest.mark.parametrize("start", [0, SPLIT])
def test_continuations_of_a_batch_match_single_ones(case, start):
    """Options and continuations of several lengths behind prompts of several lengths, with and without a document."""
    engine, ids, _ = case
    cache = engine.prefill(ids[:start]) if start else engine.new_cache()
    prompts = [ids[40:42], ids[42:49], ids[49:53]]
    continuations = [ids[10:13], ids[20:21], ids[30:39], ids[5:7]]
    owners = [0, 1, 1, 2]
    batch = engine.read_prompts(cache.fork(batch_size=3), prompts)
    made = engine.continuation_logits(batch.select(owners), continuations)
    again = engine.continuation_logits(batch.fork(), [continuations[0], continuations[1], continuations[3]])
    for logits, owner, tokens in zip(made, owners, continuations, strict=True):
        alone = engine.next_token_logits(cache.fork(), [*prompts[owner], *tokens[:-1]])
        assert close(logits, alone[len(prompts[owner]) - 1 :])
    assert close(again[2], made[3])
    answers = engine.decode_batch(batch, SamplingSettings(max_new_tokens=4))
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = engine.decode(cache.fork(batch_size=1), [prompt], SamplingSettings(max_new_tokens=4))[0]
        assert answer.token_ids == alone.token_ids


def test_embedded_model(smollm2, document):
    """SmolLM2 itself: live, and a span of everything, against plain transformers."""
    ids = smollm2.tokenizer(document)["input_ids"][:300]
    lm = smollm2.causal_lm
    lm.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0].float()
    engine = TransformersEngine(smollm2, EngineSettings(prefill_chunk=128))
    cache = engine.prefill(ids[:250])
    full = make_strategy("none").compact(CompactionRequest(engine, cache, 250)).cache
    assert close(engine.next_token_logits(cache, ids[250:]), logits[250:])
    assert close(engine.next_token_logits(full.fork(), ids[250:]), logits[250:])
    made = engine.decode(full.fork(2), [ids[250:300], ids[250:260]], SamplingSettings(max_new_tokens=8))
    assert made[0].token_ids == plain_answer(smollm2, ids, 8)
    assert made[1].token_ids == plain_answer(smollm2, ids[:260], 8)
