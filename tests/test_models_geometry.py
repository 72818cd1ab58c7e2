"""Reading a model's geometry."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers as tf
from test_models_helpers import SMALL, tiny_llama

from agentcompact.errors import UnsupportedModelError
from agentcompact.models import read_geometry


def build(config: Any) -> Any:
    with torch.device("meta"):
        return tf.AutoModelForCausalLM.from_config(config)


def test_llama() -> None:
    geometry = read_geometry(
        tiny_llama(max_position_embeddings=777, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    )
    assert geometry.model_type == "llama"
    assert (geometry.layers, geometry.query_heads, geometry.kv_heads, geometry.head_dim) == (2, 4, 2, 8)
    assert geometry.group == 2
    assert geometry.scaling == pytest.approx(8**-0.5)
    assert geometry.sliding_windows == (None, None)
    assert geometry.full_layers == (0, 1)
    assert geometry.max_positions == 777
    assert geometry.rope == {"rope_type": "default", "rope_theta": 5e5}


def test_gemma3_scale_windows_and_two_ropes() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = tf.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=100,
        layer_types=types,
        sliding_window=64,
    )
    geometry = read_geometry(build(config))
    assert geometry.scaling == pytest.approx(0.1)
    assert geometry.head_dim == 16
    assert geometry.sliding_windows == (64, None, 64)
    assert geometry.full_layers == (1,)
    assert set(geometry.rope) == {"sliding_attention", "full_attention"}
    assert json.loads(json.dumps(geometry.rope)) == geometry.rope


def test_every_layer_sliding() -> None:
    geometry = read_geometry(build(tf.MistralConfig(**SMALL, sliding_window=16)))
    assert geometry.sliding_windows == (16, 16)
    assert geometry.full_layers == ()


def test_text_part_of_a_multimodal_model() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = tf.Gemma3Config(text_config={**SMALL, "head_dim": 16}, vision_config=vision)
    geometry = read_geometry(build(config))
    assert (geometry.model_type, geometry.layers, geometry.query_heads) == ("gemma3_text", 2, 4)


@pytest.mark.parametrize("config", [tf.Phi3Config(**SMALL), tf.Qwen3Config(**SMALL, head_dim=24)])
def test_heads_fit_what_the_cache_receives(config: Any) -> None:
    torch.manual_seed(0)
    causal_lm = tf.AutoModelForCausalLM.from_config(config).eval()
    geometry = read_geometry(causal_lm)
    cache = tf.DynamicCache()
    with torch.no_grad():
        causal_lm(torch.arange(5)[None], cache=cache)
    assert cache.layers[0].keys.shape == (1, geometry.kv_heads, 5, geometry.head_dim)
    assert cache.layers[0].values.shape == cache.layers[0].keys.shape


def test_scales_that_differ_are_refused() -> None:
    causal_lm = tiny_llama()
    causal_lm.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(UnsupportedModelError, match="attention scale differs"):
        read_geometry(causal_lm)


def test_missing_attention_module_is_refused() -> None:
    causal_lm = tiny_llama()
    del causal_lm.model.layers[1].self_attn.scaling
    with pytest.raises(UnsupportedModelError, match="1 attention modules were found for 2 layers"):
        read_geometry(causal_lm)


def test_projection_of_another_size_is_refused() -> None:
    causal_lm = tiny_llama()
    causal_lm.model.layers[1].self_attn.v_proj = torch.nn.Linear(32, 32)
    with pytest.raises(UnsupportedModelError, match="projections do not make 4 queries"):
        read_geometry(causal_lm)


def test_no_context_length_is_refused() -> None:
    causal_lm = tiny_llama()
    causal_lm.config.max_position_embeddings = 0
    with pytest.raises(UnsupportedModelError, match="no context length"):
        read_geometry(causal_lm)
