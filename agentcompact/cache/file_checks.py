"""What must be true of a cache file's header and tensors, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentcompact.cache.metadata import CacheMetadata

SPAN_PARTS = ("keys", "values", "bias", "positions")
_TAIL_PARTS = ("tail_keys", "tail_values")
_INTEGERS = (torch.int32, torch.int64)


class LayerHeader(BaseModel, strict=True):
    """One layer: logical tokens that its tail does not hold, tokens of the tail, and whether it has a window."""

    before: int = Field(ge=0)
    length: int = Field(ge=0)
    sliding: bool


class FileHeader(BaseModel):
    """The JSON of a cache file."""

    version: int = Field(ge=1, strict=True)
    tokens: int = Field(ge=0, strict=True)
    layers: list[LayerHeader] = Field(min_length=1)
    metadata: CacheMetadata


def layer_tensors(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return one layer's tensors by the names of their parts."""
    start = f"layers.{index}."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}


def fault_of(header: FileHeader, tensors: Mapping[str, Tensor]) -> str | None:
    """Return what is wrong with a file's tensors, in a few words, or None."""
    known = {"token_ids"} | {
        f"layers.{index}.{part}"
        for index in range(len(header.layers))
        for part in (*SPAN_PARTS, "offsets", *_TAIL_PARTS)
    }
    unknown = sorted(set(tensors) - known)
    if unknown:
        return f"it has a tensor '{unknown[0]}' that does not belong there"
    ids = tensors.get("token_ids")
    if ids is not None and (ids.dtype not in _INTEGERS or ids.shape != (header.tokens,) or bool((ids < 0).any())):
        return f"its token ids are not those of {header.tokens} tokens"
    shapes = set()
    for index, layer in enumerate(header.layers):
        parts = layer_tensors(tensors, index)
        if layer.before + layer.length != header.tokens:
            return f"layer {index} does not cover the {header.tokens} tokens"
        fault = _span_fault(parts, layer) or _tail_fault(parts, layer)
        if fault:
            return f"layer {index}: {fault}"
        if "keys" in parts:
            shapes.add((len(parts["offsets"]) - 1, parts["keys"].shape[1]))
        if "tail_keys" in parts:
            shapes.add((parts["tail_keys"].shape[1], parts["tail_keys"].shape[3]))
    return "its layers differ in heads or head size" if len(shapes) > 1 else None


def _span_fault(parts: Mapping[str, Tensor], layer: LayerHeader) -> str | None:
    present = [name for name in (*SPAN_PARTS, "offsets") if name in parts]
    if not present:
        return "its compacted span is missing" if layer.before and not layer.sliding else None
    if len(present) < 5 or layer.sliding or not layer.before:
        return "its compacted span is incomplete"
    keys, values, bias, positions, offsets = (parts[name] for name in (*SPAN_PARTS, "offsets"))
    entries = len(keys)
    if keys.dim() != 2 or values.dim() != 2 or len(values) != entries or not entries:
        return "keys and values do not fit together"
    if bias.shape != (entries,) or positions.shape != (entries,) or positions.dtype not in _INTEGERS:
        return "biases or positions do not fit the keys"
    if offsets.dim() != 1 or len(offsets) < 2 or offsets.dtype not in _INTEGERS:
        return "its offsets are none"
    if int(offsets[0]) != 0 or int(offsets[-1]) != entries or bool((offsets.diff() < 1).any()):
        return "its offsets do not divide the entries among the heads"
    if bool(((positions < 0) | (positions >= layer.before)).any()):
        return "its positions lie outside the document"
    return _float_fault(keys, values, bias)


def _tail_fault(parts: Mapping[str, Tensor], layer: LayerHeader) -> str | None:
    present = [parts[name] for name in _TAIL_PARTS if name in parts]
    if not present:
        return "its live tail is missing" if layer.length else None
    if len(present) < 2:
        return "its live tail is incomplete"
    keys, values = present
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        return "keys and values of its live tail do not fit together"
    if keys.shape[0] != 1 or keys.shape[2] != layer.length:
        return f"its live tail does not hold {layer.length} tokens"
    return _float_fault(keys, values)


def _float_fault(*tensors: Tensor) -> str | None:
    if not all(tensor.is_floating_point() for tensor in tensors):
        return "its numbers are no floats"
    return None if all(bool(tensor.isfinite().all()) for tensor in tensors) else "it has entries that are not finite"
