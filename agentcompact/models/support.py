"""Say by name which models cannot be compacted, from the configuration and from the attention modules.

A compacted cache stands in for the keys and values of one softmax attention per layer. Everything that
breaks this (no keys at all, keys shared between layers, scores that are changed before the softmax, …) is
refused here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from agentcompact.errors import UnsupportedModelError

_ORDINARY_LAYERS = frozenset({"full_attention", "sliding_attention"})
_MLA_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
_ALIBI_FIELDS = ("alibi", "use_alibi")
# Types whose attention sinks leave no trace in the configuration; other sinks are seen in the modules.
_SINK_TYPES = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "flint"})


def check_supported(config: Any) -> None:
    """Refuse a model by its configuration, before any weight is read.

    Args:
        config: a transformers configuration. That of a multimodal model is judged by its text part.

    Raises:
        UnsupportedModelError: naming the model type and the first reason found.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise _refusal(config, "it is an encoder-decoder model")
    for reason in (_layer_reason, _head_reason, _mla_reason, _sharing_reason, _score_reason, _rope_reason):
        found = reason(text)
        if found is not None:
            raise _refusal(config, found)


def check_attention(causal_lm: Any) -> None:
    """Refuse a model by its attention modules. Works on a model whose weights are on the meta device.

    Args:
        causal_lm: a transformers causal language model.

    Raises:
        UnsupportedModelError: if its attention does not go through transformers' attention interface, is not
            causal, or is more than one softmax of scaled query-key products.
    """
    config = causal_lm.config
    if not getattr(causal_lm, "_supports_attention_backend", False):
        raise _refusal(config, "its attention does not go through transformers' attention interface")
    modules = list(attention_modules(causal_lm))
    if not modules:
        raise _refusal(config, "its attention modules cannot be recognised (no `layer_idx` and `scaling`)")
    for module in modules:
        found = _module_reason(module)
        if found is not None:
            raise _refusal(config, found)


def attention_modules(causal_lm: Any) -> Iterator[Any]:
    """The text decoder's attention modules, in the order of the layers they say they belong to."""
    decoder = causal_lm.get_decoder()
    found = [
        module
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and isinstance(getattr(module, "scaling", None), int | float)
    ]
    yield from sorted(found, key=lambda module: int(module.layer_idx))


def text_heads(config: Any) -> set[tuple[int, int, int]]:
    """The distinct `(query_heads, kv_heads, head_dim)` over the layers of a text configuration.

    Layers without attention heads are left out, so the set is empty for a model that has none.
    """
    heads = set()
    for layer in config.per_layer_config:
        query_heads = getattr(layer, "num_attention_heads", None)
        if not isinstance(query_heads, int) or query_heads < 1:
            continue
        kv_heads = getattr(layer, "num_key_value_heads", None) or query_heads
        head_dim = getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // query_heads
        heads.add((query_heads, kv_heads, head_dim))
    return heads


def _refusal(config: Any, reason: str) -> UnsupportedModelError:
    """The error for a model of `config`'s type."""
    model_type = getattr(config, "model_type", "") or type(config).__name__
    return UnsupportedModelError(f"models of type '{model_type}' cannot be compacted: {reason}")


def _layer_reason(text: Any) -> str | None:
    """Layers that are not ordinary attention over keys and values."""
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        return "its configuration states no number of layers"
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        return "it has cross-attention layers"
    types = set(get_layer_types_and_kwargs(text)[0]) - _ORDINARY_LAYERS
    if "dummy" in types:
        shared = getattr(text, "kv_sharing_modes", None) is not None
        return "some layers share other layers' keys and values" if shared else "some layers have no attention"
    if "chunked_attention" in types:
        return "it attends within chunks (chunked attention)"
    if types:
        return f"it has layers that are not softmax attention over all keys ({', '.join(sorted(types))})"
    return None


def _head_reason(text: Any) -> str | None:
    """Heads that are missing, or that differ from layer to layer."""
    heads = text_heads(text)
    if not heads:
        return "it has no attention heads (a state-space or recurrent model)"
    if len(heads) > 1:
        return "its attention heads differ from layer to layer"
    query_heads, kv_heads, head_dim = heads.pop()
    if head_dim < 1 or query_heads % kv_heads:
        return f"{query_heads} query heads cannot share {kv_heads} KV heads of dimension {head_dim}"
    return None


def _mla_reason(text: Any) -> str | None:
    """Multi-head latent attention, and values of another size than the keys."""
    if any(getattr(text, field, None) for field in _MLA_FIELDS):
        return "it uses multi-head latent attention (MLA)"
    value_dim = getattr(text, "v_head_dim", None)
    if value_dim is not None and {value_dim} != {head_dim for _, _, head_dim in text_heads(text)}:
        return "its value heads have another dimension than its key heads"
    return None


def _sharing_reason(text: Any) -> str | None:
    """Layers that read the keys and values of other layers."""
    modes = getattr(text, "kv_sharing_modes", None) or []
    if any(mode is not None for mode in modes) or getattr(text, "num_kv_shared_layers", None):
        return "some layers share other layers' keys and values"
    return None


def _score_reason(text: Any) -> str | None:
    """Attention scores that are capped, or a softmax with a sink beside the keys."""
    for field, value in text.to_dict().items():
        name = field.lower()
        if "softcap" in name.replace("_", "") and ("attn" in name or "attention" in name) and value:
            return "it caps its attention scores (soft-capping)"
        if "attention_sink" in name and value:
            return "its softmax has attention sinks"
    if text.model_type in _SINK_TYPES:
        return "its softmax has attention sinks"
    return None


def _rope_reason(text: Any) -> str | None:
    """Positions that are not put into the keys by a rotation."""
    if any(getattr(text, field, False) is True for field in _ALIBI_FIELDS):
        return "its positions are ALiBi biases, not a rotation of the keys (RoPE)"
    kind = getattr(text, "position_embedding_type", None)
    if isinstance(kind, str) and kind not in ("rope", "rotary"):
        return f"its positions are '{kind}' embeddings, not a rotation of the keys (RoPE)"
    parameters = getattr(text, "rope_parameters", None)
    if not parameters and getattr(text, "rope_theta", None) is None:
        return "its configuration has no rotary position embedding (RoPE)"
    if "longrope" in _rope_types(parameters or {}):
        # transformers picks the short or the long factors by the length of each pass, so chunks would disagree.
        return "its rotary frequencies (longrope) change with the length of each pass"
    return None


def _rope_types(parameters: dict[str, Any]) -> set[Any]:
    """The RoPE types of a configuration whose parameters are one set, or one for each type of layer."""
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return {each.get("rope_type", each.get("type")) for each in (parameters, *nested)}


def _module_reason(module: Any) -> str | None:
    """What makes one attention module more than one softmax of scaled products, or None."""
    if getattr(module, "is_causal", True) is False:
        return "its attention is not causal"
    if not _dispatches(type(module).forward):
        return "its attention does not go through transformers' attention interface"
    for name, value in vars(module).items():
        if "softcap" in name.replace("_", "") and value:
            return "it caps its attention scores (soft-capping)"
    for name, _ in module.named_parameters():
        if "sink" in name:
            return "its softmax has attention sinks"
    # Projections and norms are submodules; a parameter of the module itself changes the scores, the softmax
    # or the values (sinks, differential attention, learned masks), unless it gates the output.
    own = [name for name, _ in module.named_parameters(recurse=False) if "gate" not in name]
    if own:
        return f"its attention has parameters beside its projections ({', '.join(own)})"
    return None


def _dispatches(forward: Callable[..., Any]) -> bool:
    """Whether an attention module's `forward` looks its attention function up in the interface."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is None or "ALL_ATTENTION_FUNCTIONS" in code.co_names
