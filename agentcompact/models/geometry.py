"""The numbers of a model's attention that a compacted cache depends on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from agentcompact.errors import UnsupportedModelError
from agentcompact.models.support import attention_modules, text_heads


@dataclass(frozen=True)
class ModelGeometry:
    """The shape of a model's attention.

    Attributes:
        model_type: transformers' name of the architecture, of the text part of a multimodal model.
        layers: number of decoder layers.
        query_heads: query heads in each layer (H_q).
        kv_heads: KV heads in each layer (H_kv); H_q is a multiple of it.
        head_dim: dimension of a query, a key and a value.
        scaling: what a query-key product is multiplied by before the softmax; the same in every layer.
        sliding_windows: one item a layer: the number of latest tokens a query can see, or None for all of
            them.
        rope: the configuration's RoPE settings as plain JSON values.
        max_positions: the longest context in tokens that the configuration states.
    """

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    sliding_windows: tuple[int | None, ...]
    rope: dict[str, Any]
    max_positions: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.query_heads // self.kv_heads

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers with full attention, which can be compacted; may be empty."""
        return tuple(index for index, window in enumerate(self.sliding_windows) if window is None)


def read_geometry(causal_lm: Any) -> ModelGeometry:
    """Read the geometry off a loaded model.

    Args:
        causal_lm: a transformers causal language model; its text part is read if it is multimodal. Weights
            may be on any device, the meta device included.

    Raises:
        UnsupportedModelError: if the attention modules disagree with each other or with the configuration,
            or if the configuration states no context length.
    """
    config = causal_lm.config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(config)
    windows = tuple(
        int(layer["sliding_window"]) if layer.get("sliding_window") is not None else None for layer in options
    )
    modules = list(attention_modules(causal_lm))
    if [module.layer_idx for module in modules] != list(range(len(types))):
        raise _refusal(config, f"{len(modules)} attention modules were found for {len(types)} layers")
    query_heads, kv_heads, head_dim = _read_heads(config, modules)
    max_positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_positions, int) or max_positions < 1:
        raise _refusal(config, "its configuration states no context length (max_position_embeddings)")
    return ModelGeometry(
        model_type=config.model_type,
        layers=len(types),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scaling=_read_scaling(config, modules),
        sliding_windows=windows,
        rope=_read_rope(config),
        max_positions=max_positions,
    )


def _refusal(config: Any, reason: str) -> UnsupportedModelError:
    """The error for a model whose modules do not fit its configuration."""
    return UnsupportedModelError(f"models of type '{config.model_type}' cannot be compacted: {reason}")


def _read_scaling(config: Any, modules: list[Any]) -> float:
    """The attention scale that all layers share."""
    scales = {float(module.scaling) for module in modules}
    if len(scales) != 1:
        raise _refusal(config, "its attention scale differs from layer to layer")
    return scales.pop()


def _read_heads(config: Any, modules: list[Any]) -> tuple[int, int, int]:
    """`(query_heads, kv_heads, head_dim)` as the modules have them, checked against their projections."""
    heads = text_heads(config)
    if len(heads) != 1:
        raise _refusal(config, "its attention heads differ from layer to layer")
    query_heads, kv_heads, head_dim = heads.pop()
    found = {
        (
            query_heads // (_whole(module, "num_key_value_groups") or query_heads // kv_heads),
            _whole(module, "head_dim") or _whole(module, "head_size") or head_dim,
        )
        for module in modules
    }
    if len(found) != 1:
        raise _refusal(config, "its attention heads differ from layer to layer")
    kv_heads, head_dim = found.pop()
    if not all(_projections_fit(module, query_heads, kv_heads, head_dim) for module in modules):
        raise _refusal(
            config,
            f"its projections do not make {query_heads} queries and {kv_heads} keys and values of {head_dim}",
        )
    return query_heads, kv_heads, head_dim


def _projections_fit(module: Any, query_heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the key and value projections, separate or fused with the queries, have the sizes expected."""
    if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
        sizes = {_whole(module.k_proj, "out_features"), _whole(module.v_proj, "out_features")}
        return sizes == {kv_heads * head_dim}
    fused = (query_heads + 2 * kv_heads) * head_dim
    return any(_whole(child, "out_features") == fused for child in module.children())


def _whole(holder: Any, name: str) -> int | None:
    """The attribute `name` of `holder` if it is an int, else None."""
    value = getattr(holder, name, None)
    return value if isinstance(value, int) else None


def _read_rope(config: Any) -> dict[str, Any]:
    """The RoPE settings as plain JSON values; one mapping a layer type for models that have several."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
    plain: dict[str, Any] = json.loads(json.dumps(parameters, default=str))
    return plain
