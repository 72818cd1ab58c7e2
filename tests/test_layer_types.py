"""Layers of other kinds: windows that begin at a depth, and output projections that are quantised."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokens
from torch import nn

from agentcompact import CompactionRequest, TransformersEngine, make_strategy
from agentcompact.cache import SlidingLayer

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 4}


@pytest.fixture
def windowed():
    """Qwen2 of which layers from `max_window_layers` on slide."""
    return TransformersEngine(tiny_model("qwen2", **WINDOWS))


def test_windows_that_begin_at_a_depth(windowed):
    assert windowed.geometry.full_layers == (0, 1)
    assert list(windowed.geometry.sliding_windows) == [None, None, 16, 16]


def test_windowed_layers_read_as_plain_transformers_does(windowed):
    ids = tiny_tokens(70)
    cache = windowed.prefill(ids[:50])
    ours = windowed.next_token_logits(cache, ids[50:])
    windowed.model.causal_lm.set_attn_implementation("eager")
    with torch.no_grad():
        plain = windowed.model.causal_lm(torch.tensor([ids])).logits[0, 50:]
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["attention_matching", "two_pass", "kvzip_plus", "streaming_llm", "expected_attention"]
)
def test_global_layers_are_compacted_and_sliding_ones_keep_their_window(windowed, name):
    cache = windowed.prefill(tiny_tokens(60))
    before = {index: layer.fork() for index, layer in enumerate(cache.layers) if isinstance(layer, SlidingLayer)}
    small = make_strategy(name).compact(CompactionRequest(windowed, cache, 15)).cache
    assert small.entries == 2 * 2 * 15
    for index, layer in before.items():
        now = small.layers[index]
        assert torch.equal(now.tail.keys[:, :, : now.length], layer.tail.keys[:, :, : layer.length])
    logits = windowed.next_token_logits(small, tiny_tokens(5, seed=1))
    assert logits.isfinite().all()
    assert small.next_position == 65


class ProductOnly(nn.Module):
    """A linear layer that keeps its weight in eight bits and gives products alone, as quantised layers do."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("packed", (weight / self.scale).round().to(torch.int8))

    def forward(self, states):
        return states @ (self.packed.to(states.dtype) * self.scale).T


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_quantised_output_projection_is_asked_for_its_product(kind):
    engine = TransformersEngine(tiny_model(kind))
    values = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    for layer in engine.model.causal_lm.model.layers:
        layer.self_attn.o_proj = ProductOnly(layer.self_attn.o_proj)
    projection = engine.model.causal_lm.model.layers[1].self_attn.o_proj
    weight = projection.packed * projection.scale
    wanted = torch.stack([(values[h // 2] @ weight[:, 16 * h : 16 * (h + 1)].T).norm(dim=-1) for h in range(4)])
    torch.testing.assert_close(engine.output_norms(1, values), wanted, atol=1e-4, rtol=1e-4)
    cache = engine.prefill(tiny_tokens(40))
    assert make_strategy("kvzip_plus").compact(CompactionRequest(engine, cache, 10)).cache.held_positions == 10


@pytest.mark.slow
def test_a_model_in_four_bits(smollm2, tmp_path):
    """bitsandbytes' layers for real; installed by hand, since nothing else needs them."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from agentcompact import answer, compact, wrap_model

    smollm2.causal_lm.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32)
    assert isinstance(small.model.layers[0].self_attn.o_proj, bitsandbytes.nn.Linear4bit)
    engine = TransformersEngine(wrap_model(small, smollm2.tokenizer, name="four-bits"))
    text = "The river is the Orrin. " * 30
    for name in ("kvzip_plus", "attention_matching", "two_pass"):
        cache = compact(engine, text, name, ratio=4)
        assert "Orrin" in answer(engine, cache, "What is the river?", max_new_tokens=12)[0].text
