"""transformers' own generation over a compacted cache: right, or refused by name."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from agentcompact import (
    CompactedCache,
    CompactionRequest,
    TransformersEngine,
    generation_inputs,
    make_strategy,
)
from agentcompact.errors import AttentionImplementationError, CacheError

SPLIT = 40


@pytest.fixture(scope="module")
def setting():
    """(model, ids, cache whose span holds the first SPLIT tokens, plain greedy tokens)."""
    model = tiny_model("llama")
    torch.manual_seed(2)
    ids = torch.randint(5, 100, (1, 50))
    lm = model.causal_lm
    lm.generation_config.eos_token_id = None
    lm.generation_config.pad_token_id = 0
    lm.set_attn_implementation("sdpa")
    plain = lm.generate(ids, max_new_tokens=12, do_sample=False)[0, 50:]
    beams = lm.generate(ids, max_new_tokens=12, do_sample=False, num_beams=3)[0, 50:]
    engine = TransformersEngine(model)
    cache = engine.prefill(ids[0, :SPLIT].tolist())
    cache = make_strategy("none").compact(CompactionRequest(engine, cache, SPLIT)).cache
    return lm, ids, cache, plain, beams


def test_full_ids(setting):
    lm, ids, cache, plain, _ = setting
    assert torch.equal(lm.generate(ids, cache=cache.fork(), max_new_tokens=12, do_sample=False)[0, 50:], plain)


def test_question_ids_alone(setting):
    lm, ids, cache, plain, _ = setting
    inputs = generation_inputs(cache.fork(), ids[:, SPLIT:])
    assert torch.equal(lm.generate(**inputs, max_new_tokens=12, do_sample=False)[0, 10:], plain)


def test_beam_search(setting):
    lm, ids, cache, _, beams = setting
    made = lm.generate(ids, cache=cache.fork(), max_new_tokens=12, do_sample=False, num_beams=3)
    assert torch.equal(made[0, 50:], beams)


def test_assisted_decoding_is_refused_by_name(setting):
    """transformers feeds a prefilled cache its prompt twice there, whatever the cache."""
    lm, ids, cache, _, _ = setting
    helper = tiny_model("llama", num_hidden_layers=1).causal_lm
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": helper}):
        with pytest.raises(ValueError, match="Assisted decoding"):
            lm.generate(ids, cache=cache.fork(), max_new_tokens=12, do_sample=False, **options)


def test_sampling_matches_plain_sampling(setting):
    lm, ids, cache, _, _ = setting
    lm.set_attn_implementation("sdpa")
    torch.manual_seed(5)
    plain = lm.generate(ids, max_new_tokens=12, do_sample=True)
    lm.set_attn_implementation("agentcompact")
    torch.manual_seed(5)
    assert torch.equal(lm.generate(ids, cache=cache.fork(), max_new_tokens=12, do_sample=True), plain)


def test_compiled_model_is_right_or_refused(setting):
    lm, ids, cache, _, _ = setting
    eager = lm(ids[:, SPLIT:], cache=cache.fork()).logits
    compiled = torch.compile(lm, backend="eager")
    try:
        logits = compiled(ids[:, SPLIT:], cache=cache.fork()).logits
    except AttentionImplementationError as error:
        assert "compile" in str(error)
    else:
        assert torch.allclose(logits, eager, atol=1e-4)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_attention_implementation_is_refused_by_name(setting, implementation):
    lm, ids, cache, _, _ = setting
    lm.set_attn_implementation(implementation)
    try:
        with pytest.raises(AttentionImplementationError, match=f"'{implementation}'.*set_attn_implementation"):
            lm.generate(ids, cache=cache.fork(), max_new_tokens=2)
        plain = lm(ids).logits  # an uncompacted cache works under any implementation
        fresh = CompactedCache(cache.geometry, cache.config)
        lm(ids[:, :30], cache=fresh)
        assert torch.allclose(lm(ids[:, 30:], cache=fresh).logits, plain[:, 30:], atol=1e-4)
    finally:
        lm.set_attn_implementation("agentcompact")


def test_static_and_offloaded_uses_are_refused(setting):
    _, _, cache, _, _ = setting
    with pytest.raises(CacheError, match="offloaded"):
        cache.layers[0].offload()
    assert not cache.is_compileable


def test_position_of_the_first_token_after_the_span(setting):
    """The first token after an N-token span gets position N, as seen by the rotary embedding."""
    lm, ids, cache, _, _ = setting
    seen = []
    handle = lm.model.rotary_emb.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append(kwargs.get("position_ids", args[1] if len(args) > 1 else None)),
        with_kwargs=True,
    )
    try:
        lm.generate(ids, cache=cache.fork(), max_new_tokens=1, do_sample=False)
    finally:
        handle.remove()
    assert seen[0][0, 0].item() == SPLIT
    assert seen[0][0, -1].item() == 49
