"""Which models are refused, and by which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from test_models_helpers import SMALL, tiny_llama

from agentcompact.errors import UnsupportedModelError
from agentcompact.models import check_attention, check_supported, read_geometry

MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def build(config: Any) -> Any:
    """The causal language model of a configuration, without weights."""
    with torch.device("meta"):
        return tf.AutoModelForCausalLM.from_config(config)


ACCEPTED = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=None),
    "mistral, sliding": lambda: tf.MistralConfig(**SMALL),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=16),
    "gemma": lambda: tf.GemmaConfig(**SMALL, head_dim=16),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL, head_dim=16),
    "gemma3, multimodal": lambda: tf.Gemma3Config(
        text_config={**SMALL, "head_dim": 16},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    ),
    "phi3": lambda: tf.Phi3Config(**SMALL),
    "olmo2": lambda: tf.Olmo2Config(**SMALL),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=2),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SMALL, **MOE),
    "smollm3, some layers without RoPE": lambda: tf.SmolLM3Config(**SMALL, no_rope_layers=[1, 0]),
    "gpt_neox, fused projections": lambda: tf.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    ),
}

_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED = {
    "phi3": (
        lambda: tf.Phi3Config(**SMALL, rope_parameters=_LONG, original_max_position_embeddings=64),
        "longrope",
    ),
    "t5": (lambda: tf.T5Config(num_layers=2), "encoder-decoder"),
    "gpt2": (lambda: tf.GPT2Config(n_layer=2), "no rotary position embedding"),
    "opt": (lambda: tf.OPTConfig(num_hidden_layers=2), "no rotary position embedding"),
    "bloom": (lambda: tf.BloomConfig(n_layer=2), "no rotary position embedding"),
    "mpt": (lambda: tf.MptConfig(n_layers=2), "no rotary position embedding"),
    "falcon": (lambda: tf.FalconConfig(num_hidden_layers=2, alibi=True), "ALiBi"),
    "mamba": (lambda: tf.MambaConfig(num_hidden_layers=2), "linear_attention"),
    "rwkv": (lambda: tf.RwkvConfig(num_hidden_layers=2), "no attention heads"),
    "jamba": (lambda: tf.JambaConfig(num_hidden_layers=8), "linear_attention"),
    "bamba": (lambda: tf.BambaConfig(num_hidden_layers=2), "linear_attention"),
    "lfm2": (lambda: tf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), r"\(conv\)"),
    "qwen3_next": (lambda: tf.Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
    "gemma2": (lambda: tf.Gemma2Config(**SMALL), "soft-capping"),
    "gpt_oss": (lambda: tf.GptOssConfig(**SMALL), "attention sinks"),
    "deepseek_v3": (lambda: tf.DeepseekV3Config(num_hidden_layers=2), "latent attention"),
    "llama4_text": (lambda: tf.Llama4TextConfig(num_hidden_layers=4), "chunked"),
    "gemma3n_text": (lambda: tf.Gemma3nTextConfig(), "share other layers' keys"),
    "gemma4_text": (lambda: tf.Gemma4TextConfig(), "differ from layer to layer"),
    "mimo_v2_flash": (lambda: tf.MiMoV2FlashConfig(), "another dimension"),
    "mllama": (lambda: tf.MllamaConfig(), "cross-attention"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    config = ACCEPTED[name]()
    check_supported(config)
    causal_lm = build(config)
    check_attention(causal_lm)
    text = config.get_text_config(decoder=True)
    geometry = read_geometry(causal_lm)
    assert geometry.layers == 2
    assert geometry.query_heads == text.num_attention_heads


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_configuration(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_supported(make())
    message = str(caught.value)
    assert f"models of type '{name}'" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_logit_softcapping": 30.0}, "soft-capping"),
        ({"num_kv_shared_layers": 1}, "share other layers' keys"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"v_head_dim": 4}, "another dimension"),
        ({"position_embedding_type": "absolute"}, "'absolute' embeddings"),
        ({"alibi": True}, "ALiBi"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 8}, "chunked"),
        ({"per_layer_config": {1: {"num_key_value_heads": 4}}}, "differ from layer to layer"),
    ],
)
def test_one_change_to_a_llama_is_enough(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(tf.LlamaConfig(**SMALL, **changes))


@pytest.mark.parametrize("changes", [{"attn_logit_softcapping": None}, {"final_logit_softcapping": 30.0}])
def test_harmless_settings(changes: dict[str, Any]) -> None:
    check_supported(tf.LlamaConfig(**SMALL, **changes))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.StableLmConfig(**SMALL), "attention interface"),
        (
            tf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
            "interface",
        ),
        (tf.GptOssConfig(**SMALL, num_local_experts=2), "attention sinks"),
        (tf.Gemma2Config(**SMALL, head_dim=16), "soft-capping"),
        (tf.DiffLlamaConfig(**SMALL), r"lambda_q1"),
        (tf.DogeConfig(**SMALL), r"beside its projections \(A\)"),
        (tf.Gemma3TextConfig(**SMALL, head_dim=16, use_bidirectional_attention=True), "not causal"),
        (tf.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "interface"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_refused_by_modules(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_attention(build(config))
    assert f"'{config.model_type}'" in str(caught.value)


def test_sink_parameter_added_to_a_llama_is_seen() -> None:
    causal_lm = tiny_llama()
    check_attention(causal_lm)
    causal_lm.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        check_attention(causal_lm)


def test_attention_of_its_own_is_seen() -> None:
    class OwnAttention(torch.nn.Module):
        layer_idx, scaling, is_causal = 0, 1.0, True

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    causal_lm = tiny_llama()
    causal_lm.model.layers[0].self_attn = OwnAttention()
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        check_attention(causal_lm)
