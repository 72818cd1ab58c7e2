"""The cache file: one safetensors file, no pickle, with everything needed to check and to use it.

Tensors are named `layers.<index>.<part>`: `keys`, `values`, `bias`, `positions`, `offsets` of a compacted span,
`tail_keys` and `tail_values` of the live tail or window; `token_ids` are the logical tokens. Keys are stored after
RoPE in transformers' layout. The metadata is JSON under `agentcompact`, its digest (with all names, shapes and bytes
of tensors) under `digest`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentcompact.cache.compacted import CompactedCache
from agentcompact.cache.digest import tensors_digest
from agentcompact.cache.file_checks import SPAN_PARTS, FileHeader, LayerHeader, fault_of, layer_tensors
from agentcompact.cache.layers import FullLayer
from agentcompact.cache.span import Span
from agentcompact.cache.tail import TailBuffer
from agentcompact.errors import CacheError, CacheFileError, DocumentError, WriteError, one_line
from agentcompact.files import atomic_output

if TYPE_CHECKING:
    from agentcompact.models import LoadedModel

FORMAT_VERSION = 1


def save_cache(cache: CompactedCache, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the cache to `path`, whole or not at all, readable by its owner only.

    Raises OutputExistsError where the file exists and `overwrite` is False, WriteError where it cannot be written,
    CacheError for a cache of several sequences.
    """
    path = Path(path)
    tensors = _tensors_of(cache)
    header = {
        "version": FORMAT_VERSION,
        "tokens": cache.next_position,
        "layers": [_layer_header(layer) for layer in cache.layers],
        "metadata": cache.metadata.model_dump(mode="json"),
    }
    text = json.dumps(header, ensure_ascii=True, sort_keys=True)
    with atomic_output(path, overwrite=overwrite) as temporary:
        try:
            save_file(tensors, temporary, {"agentcompact": text, "digest": tensors_digest(text, tensors)})
        except SafetensorError as error:
            raise WriteError(f"{path} could not be written: {one_line(error)}") from error
    return path


def read_header(path: str | Path) -> FileHeader:
    """Return the file's header (version, tokens, layers, metadata) without reading its tensors.

    Raises DocumentError where there is no such file, CacheFileError where it is no cache file, is truncated, or is
    of a newer version. The digest is not checked.
    """
    return _open(Path(path))[0]


def load_cache(path: str | Path, model: LoadedModel) -> CompactedCache:
    """Read a cache file for `model`, on its device and in its dtype.

    Raises DocumentError where there is no such file, CacheFileError where the file is truncated or damaged, of a
    newer version, or made by another model or tokenizer.
    """
    path = Path(path)
    header, tensors = read_verified(path)
    cache = CompactedCache(model.geometry, model.causal_lm.config.get_text_config(decoder=True))
    _check_belongs(path, header, tensors, model)
    cache.metadata = header.metadata
    cache.token_ids = tensors["token_ids"].tolist() if "token_ids" in tensors else []
    for index, (layer, facts) in enumerate(zip(cache.layers, header.layers, strict=True)):
        parts = {part: tensor.to(model.device) for part, tensor in layer_tensors(tensors, index).items()}
        _fill_layer(layer, facts, parts, model.dtype)
    return cache


def read_verified(path: Path) -> tuple[FileHeader, dict[str, Tensor]]:
    """Return header and tensors of a file whose digest and structure are right; raises as `load_cache` does."""
    header, text, digest = _open(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} is damaged: {one_line(error)}") from error
    if tensors_digest(text, tensors) != digest:
        raise CacheFileError(f"{path} is damaged: its content does not match its digest; compact the document again")
    fault = fault_of(header, tensors)
    if fault:
        raise CacheFileError(f"{path} is no sound cache file: {fault}")
    return header, tensors


def _tensors_of(cache: CompactedCache) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, FullLayer) and layer.span is not None:
            for part in SPAN_PARTS:
                tensors[f"layers.{index}.{part}"] = getattr(layer.span, part).detach().contiguous().cpu()
            tensors[f"layers.{index}.offsets"] = torch.tensor(layer.span.offsets, dtype=torch.int64)
        if layer.tail is not None and layer.length:
            if layer.tail.batch != 1:
                raise CacheError("a cache of several sequences cannot be saved: save one at a time")
            tail = layer.tail
            tensors[f"layers.{index}.tail_keys"] = tail.keys[:, :, : layer.length].detach().cpu().contiguous()
            tensors[f"layers.{index}.tail_values"] = tail.values[:, :, : layer.length].detach().cpu().contiguous()
    if len(cache.token_ids) == cache.next_position:
        tensors["token_ids"] = torch.tensor(cache.token_ids, dtype=torch.int32)
    # The safetensors format refuses tensors that share memory, and views of one buffer do.
    return {name: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t for name, t in tensors.items()}


def _layer_header(layer: Any) -> dict[str, Any]:
    return {"before": layer.before, "length": layer.length, "sliding": bool(layer.is_sliding)}


def _fill_layer(layer: Any, facts: LayerHeader, parts: dict[str, Tensor], dtype: torch.dtype) -> None:
    layer.before, layer.length = facts.before, facts.length
    if "keys" in parts:
        keys, values, bias, positions = (parts[name] for name in SPAN_PARTS)
        layer.span = Span(keys, values, bias, positions, tuple(parts["offsets"].tolist())).to(dtype=dtype)
    if "tail_keys" in parts:
        layer.tail = TailBuffer(parts["tail_keys"].to(dtype), parts["tail_values"].to(dtype), layer.length)
        layer.is_initialized = True


def _open(path: Path) -> tuple[FileHeader, str, str]:
    """Return (header, its text, digest) after the checks that need no tensor."""
    if not path.exists():
        raise DocumentError(f"no such file: {path}")
    if not path.is_file():
        raise DocumentError(f"{path} is not a file")
    _check_length(path)
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} is not a cache file, or is damaged: {one_line(error)}") from error
    if "agentcompact" not in stored or "digest" not in stored:
        raise CacheFileError(f"{path} is not a cache file: it was not written by agentcompact")
    text = stored["agentcompact"]
    try:
        version = json.loads(text)["version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CacheFileError(
                f"{path} has file version {version}, this release reads up to {FORMAT_VERSION}: upgrade agentcompact"
            )
        header = FileHeader.model_validate_json(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheFileError(f"{path} is damaged: its header cannot be read") from error
    return header, text, stored["digest"]


def _check_length(path: Path) -> None:
    """Say that a file is cut short, and by how much, before a parser says something less clear."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CacheFileError(f"{path} is not a cache file: it has only {size} bytes")
        header_bytes = struct.unpack("<Q", start)[0]
        if header_bytes > 100_000_000:
            raise CacheFileError(f"{path} is not a cache file, or its first bytes are damaged")
        if size < 8 + header_bytes:
            raise CacheFileError(f"{path} is truncated: {size} bytes, its header alone needs {8 + header_bytes}")
        try:
            entries = json.loads(file.read(header_bytes))
            ends = [v["data_offsets"][1] for k, v in entries.items() if k != "__metadata__"]
            needed = 8 + header_bytes + max(map(int, ends), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            raise CacheFileError(f"{path} is not a cache file, or its header is damaged") from error
    if size < needed:
        raise CacheFileError(f"{path} is truncated: {size} of {needed} bytes; compact the document again")


def _check_belongs(path: Path, header: FileHeader, tensors: dict[str, Tensor], model: LoadedModel) -> None:
    metadata, geometry = header.metadata, model.geometry
    half = {metadata.model_dtype, str(model.dtype).removeprefix("torch.")}
    if metadata.model_fingerprint != model.fingerprint and "float16" in half and len(half) == 2:
        raise CacheFileError(
            f"{path} was made by {metadata.model_source} in {metadata.model_dtype or 'another number format'}, "
            f"this is {model.source.identity} in {model.dtype}: load it in that format (--dtype)"
        )
    if metadata.model_fingerprint != model.fingerprint:
        raise CacheFileError(
            f"{path} was made by another model ({metadata.model_source}, {metadata.model_fingerprint[:8]}), "
            f"not by this one ({model.source.identity}, {model.fingerprint[:8]}): give --model as it was"
        )
    if metadata.tokenizer_hash != model.tokenizer_hash:
        raise CacheFileError(
            f"{path} was made with another tokenizer than {model.source.identity} has now: "
            "use the tokenizer it was made with, or compact the document again"
        )
    ids, known = tensors.get("token_ids"), model.causal_lm.get_input_embeddings().num_embeddings
    if ids is not None and ids.numel() and int(ids.max()) >= known:
        raise CacheFileError(f"{path} is no sound cache file: a token id is beyond the model's {known:,}")
    shape = (geometry.kv_heads, geometry.head_dim)
    windows = [window is not None for window in geometry.sliding_windows]
    spans = [part for index in range(len(header.layers)) for part in [layer_tensors(tensors, index)] if "keys" in part]
    tails = [t for name, t in tensors.items() if name.endswith("tail_keys")]
    if (
        [layer.sliding for layer in header.layers] != windows
        or any((len(part["offsets"]) - 1, part["keys"].shape[1]) != shape for part in spans)
        or any((tail.shape[1], tail.shape[3]) != shape for tail in tails)
    ):
        raise CacheFileError(f"{path} is no sound cache file: its layers or heads are not the model's")
