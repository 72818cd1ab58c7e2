"""The engine's rotary embedding, output norms and input norms, against the model's own keys, weights and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny import _SIZES, tiny_model, tiny_tokenizer, tiny_tokens

from agentcompact import EngineSettings, TransformersEngine, wrap_model
from agentcompact.engines.rotary import Layout, Rotary
from agentcompact.errors import CacheError, UnsupportedModelError

SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}
ARCHITECTURES = {
    "Phi": (False, 8),  # the first half of the dimensions, in halves
    "Nemotron": (False, 8),
    "Cohere": (True, 16),  # all, side by side
    "Glm": (True, 8),
    "Helium": (True, 16),
}


def other_model(name, **changes):
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, "partial_rotary_factor": 0.5, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32)
    return wrap_model(model, tiny_tokenizer(), name=name)


def first_keys(engine, before):
    """Keys (kv_heads, 6, head_dim) of the first layer for the same six tokens behind others: they know no context."""
    cache = engine.prefill([*tiny_tokens(before, seed=9), *tiny_tokens(6)])
    span = cache.source(0, before, before + 6)
    return span.dense(span.keys)


def assert_rotates_as_the_model(engine):
    near, far = first_keys(engine, 0), first_keys(engine, 211)
    here, there = torch.arange(6), torch.arange(211, 217)
    plain = engine.rotate(near, here, back=True)
    torch.testing.assert_close(engine.rotate(far, there, back=True), plain, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(engine.rotate(plain, there), far, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(engine.rotate(plain, here), near, rtol=1e-5, atol=1e-5)
    each = torch.stack([here, there])
    mixed = engine.rotate(plain, each)  # positions of each head
    torch.testing.assert_close(mixed[0], near[0], rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(mixed[1], far[1], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotations(kind):
    parameters = {"rope_theta": 10_000.0, **SCALED[kind]}
    assert_rotates_as_the_model(TransformersEngine(tiny_model("llama", rope_parameters=parameters)))


def test_yarns_factor_is_taken_back():
    engine = TransformersEngine(tiny_model("llama", rope_parameters={"rope_theta": 10_000.0, **SCALED["yarn"]}))
    states = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    turned = engine.rotate(states, torch.arange(40, 44))
    factor = turned.norm() / states.norm()
    assert 1.1 < factor < 1.5  # 0.1 ln(8) + 1
    torch.testing.assert_close(engine.rotate(turned, torch.arange(40, 44), back=True), states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_usual_models(kind):
    assert_rotates_as_the_model(TransformersEngine(tiny_model(kind)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_partial_and_interleaved_rotations(name):
    engine = TransformersEngine(other_model(name))
    interleaved, rotated = ARCHITECTURES[name]
    assert_rotates_as_the_model(engine)
    states = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))
    turned = engine.rotate(states, torch.tensor([3]))
    assert torch.equal(turned[..., rotated:], states[..., rotated:])
    pair = [0, 1] if interleaved else [0, rotated // 2]
    torch.testing.assert_close(turned[..., pair].norm(), states[..., pair].norm())


def test_gemma3_rotates_by_its_global_embedding():
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    types = ["full_attention", "sliding_attention", "full_attention"]
    engine = TransformersEngine(tiny_model("gemma3", layer_types=types, rope_parameters=parameters))
    assert_rotates_as_the_model(engine)
    unit = torch.zeros(1, 1, 16)
    unit[..., 1] = 1  # turned by position * theta^(-1/8)
    angle = torch.tensor(100 * 1_000_000.0 ** (-1 / 8))
    torch.testing.assert_close(engine.rotate(unit, torch.tensor([100]))[0, 0, 1], angle.cos(), rtol=1e-4, atol=1e-4)


def test_layers_without_rotation_are_refused():
    engine = TransformersEngine(other_model("SmolLM3", num_hidden_layers=4, no_rope_layer_interval=4))
    with pytest.raises(UnsupportedModelError, match=r"smollm3.*layers differ"):
        engine.rotate(torch.zeros(1, 1, 16), torch.tensor([0]))


def test_an_unknown_rotation_is_refused():
    """Keys that no layout explains."""
    engine = TransformersEngine(tiny_model("llama"))

    def keys(position):
        return [torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(position))]

    with pytest.raises(UnsupportedModelError, match="how their keys are rotated cannot be told"):
        Rotary.of_model(engine.model.causal_lm, keys, engine.geometry)


def test_half_precision_states_are_rotated_in_float32():
    engine = TransformersEngine(tiny_model("llama"))
    states = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(400, 403)
    turned = engine.rotate(states, positions)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, engine.rotate(states.float(), positions).bfloat16())


def test_a_model_in_bfloat16_is_recognised():
    model = tiny_model("llama")
    half = wrap_model(model.causal_lm.to(torch.bfloat16), tiny_tokenizer(), name="half")
    assert TransformersEngine(half)._rotary._layout == Layout(False, "halves")


class Hidden(torch.nn.Module):
    """A linear layer that shows no weight."""

    def __init__(self, weight, bias):
        super().__init__()
        self._product = lambda states: states @ weight.T + bias

    def forward(self, states):
        return self._product(states)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_output_norms_are_those_of_the_projection(kind, hidden):
    model = tiny_model(kind)
    g = torch.Generator().manual_seed(1)
    values = torch.randn(2, 5, 16, generator=g)
    engine = TransformersEngine(model)
    attention = model.causal_lm.get_decoder().layers[1].self_attn
    weight = attention.o_proj.weight.detach().clone()
    if hidden:
        attention.o_proj = Hidden(weight, torch.randn(len(weight), generator=g))
    norms = engine.output_norms(1, values)
    assert norms.shape == (4, 5)
    for head in range(4):
        for entry in range(5):
            expected = (weight[:, 16 * head : 16 * head + 16].double() @ values[head // 2, entry].double()).norm()
            assert float(norms[head, entry]) == pytest.approx(float(expected), rel=1e-4)
    torch.testing.assert_close(engine.output_norms(1, values[1:], range(1, 2)), norms[2:])


def test_an_output_projection_of_another_name_is_refused():
    model = tiny_model("llama")
    engine = TransformersEngine(model)
    attention = model.causal_lm.get_decoder().layers[0].self_attn
    del attention.o_proj
    with pytest.raises(UnsupportedModelError, match="output projection"):
        engine.output_norms(0, torch.zeros(2, 1, 16))


def states_into_attention(model, ids):
    """Norms of what each layer's self-attention module receives, by hooks of the test's own."""
    found, handles = [], []
    for layer in model.causal_lm.get_decoder().layers:
        handles.append(layer.input_layernorm.register_forward_hook(lambda *a: found.append(a[-1][0].norm(dim=-1))))
    with torch.no_grad():
        TransformersEngine(model).prefill(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_input_norms_are_recorded_on_request_beside_the_queries(kind):
    model = tiny_model(kind)
    engine = TransformersEngine(model, EngineSettings(prefill_chunk=7))
    ids = tiny_tokens(30)
    expected = states_into_attention(model, ids)
    with engine.recording_input_norms():
        store = engine.capture([ids], seed=0)
    for index in engine.geometry.full_layers:
        torch.testing.assert_close(store.input_norms(index), expected[index][store.positions], rtol=1e-4, atol=1e-4)
        assert len(store.input_norms(index)) == store.layer(index).shape[1] == 30
    assert torch.equal(store.clone().input_norms(1), store.input_norms(1))
    assert torch.equal(store.before(20).input_norms(1), store.input_norms(1)[store.positions < 20])


def test_a_sample_keeps_the_norms_of_its_own_positions():
    model = tiny_model("llama")
    engine = TransformersEngine(model, EngineSettings(prefill_chunk=7, capture_bytes=6 * 2 * 4 * 16 * 4))
    ids = tiny_tokens(30)
    expected = states_into_attention(model, ids)
    with engine.recording_input_norms():
        store = engine.capture([ids], seed=0)
    assert len(store) == 6
    for index in (0, 1):
        torch.testing.assert_close(store.input_norms(index), expected[index][store.positions], rtol=1e-4, atol=1e-4)


def test_nothing_stays_on_the_model_and_nothing_is_recorded_unasked():
    model = tiny_model("llama")
    engine = TransformersEngine(model)
    with pytest.raises(CacheError, match="no norms"):
        engine.capture([tiny_tokens(5)], seed=0).input_norms(0)

    def fails():
        with engine.recording_input_norms():
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fails()
    with engine.recording_input_norms():
        cache = engine.prefill(tiny_tokens(5), capture_seed=0)  # not a capture
    with pytest.raises(CacheError, match="no norms"):
        cache.captured.input_norms(0)
    assert not any(module._forward_pre_hooks for module in model.causal_lm.modules())


def test_queries_at_positions():
    engine = TransformersEngine(tiny_model("llama"))
    store = engine.prefill(tiny_tokens(30), capture_seed=0).captured
    assert store.positions_within(10, 20).tolist() == list(range(10, 20))
    assert store.layer(1, 10, 20).shape[1] == 10
    assert torch.equal(store.positions_within(), store.positions)
