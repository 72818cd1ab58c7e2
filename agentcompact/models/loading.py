"""Load a model by name, from wherever it comes, ready for compaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from agentcompact.models.devices import AUTO, check_one_device, pick_device, pick_dtype
from agentcompact.models.embedded import EMBEDDED_FILE, EMBEDDED_SHA256, embedded_gguf
from agentcompact.models.fingerprint import model_fingerprint, tokenizer_hash
from agentcompact.models.folder import read_config, read_skeleton, read_tokenizer, read_weights
from agentcompact.models.geometry import ModelGeometry, read_geometry
from agentcompact.models.gguf import convert_gguf, converted_folder, is_converted
from agentcompact.models.hub import cached_snapshot, download_snapshot
from agentcompact.models.sources import EMBEDDED_ALIAS, ModelSource, resolve_source
from agentcompact.models.support import check_attention, check_supported
from agentcompact.models.text_encoder import TextEncoder

Progress = Callable[[str], None]


@dataclass
class LoadedModel:
    """A model and everything about it that compaction needs to know.

    Attributes:
        causal_lm: the transformers model, in eval mode, none of its parameters asking for gradients.
        tokenizer: its transformers tokenizer.
        geometry: the shape of its attention.
        source: where it came from.
        fingerprint: a hash of its weights (see `model_fingerprint`).
        tokenizer_hash: a hash of its tokenizer.
    """

    causal_lm: Any
    tokenizer: Any
    geometry: ModelGeometry
    source: ModelSource
    fingerprint: str
    tokenizer_hash: str

    @cached_property
    def encoder(self) -> TextEncoder:
        """Text to token ids, by a private copy of the tokenizer."""
        return TextEncoder(self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.causal_lm.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        dtype: torch.dtype = self.causal_lm.dtype
        return dtype


def load_model(
    name: str = EMBEDDED_ALIAS,
    *,
    dtype: str = AUTO,
    device: str = AUTO,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model called `name`, with its attention on "sdpa".

    Args:
        name: the alias `smollm2`, a model folder, a `.gguf` file, or a hub id.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on the CPU, bfloat16 elsewhere.
        device: a torch device such as "cpu" or "cuda:1", or "auto": the GPU if there is one.
        revision: a branch, tag or commit, for hub models only.
        trust_remote_code: whether Python code that comes with the model may run.
        progress: called with one line for each thing that is being done.

    Raises:
        ModelNotFoundError: if the model is not there, cannot be fetched, or is damaged.
        UnsupportedModelError: if its attention cannot be compacted. This is decided before weights are
            read, and for hub models before they are downloaded.
        InputError: if the dtype or the device is not available, or the model needs code that is not trusted.
        WriteError: if a cache folder cannot be written.
    """
    report = progress if progress is not None else _ignore
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    source = resolve_source(name, revision=revision)
    check = partial(_check_folder, name=name, trust_remote_code=trust_remote_code)
    folder = _find_folder(source, revision, check, report)
    check(folder)
    report(f"loading {source.identity}")
    tokenizer = read_tokenizer(folder, name, trust_remote_code=trust_remote_code)
    causal_lm = read_weights(
        folder, name, dtype=chosen_dtype, device=chosen_device, trust_remote_code=trust_remote_code
    )
    return _finish(causal_lm, tokenizer, source)


def wrap_model(causal_lm: Any, tokenizer: Any, *, name: str | None = None) -> LoadedModel:
    """Take a transformers model that is loaded already; it is put into eval mode with gradients off.

    Args:
        causal_lm: a causal language model, all of it on one device.
        tokenizer: its tokenizer.
        name: what to call it; by default the name it was loaded by, or its class name.

    Raises:
        UnsupportedModelError: if it is spread over several devices, or its attention cannot be compacted.
    """
    check_one_device(causal_lm)
    check_supported(causal_lm.config)
    known_as = name or getattr(causal_lm, "name_or_path", "") or type(causal_lm).__name__
    return _finish(causal_lm, tokenizer, ModelSource("memory", known_as, None, known_as))


def _find_folder(source: ModelSource, revision: str | None, check: Callable[[Path], None], report: Progress) -> Path:
    """The transformers folder of a source, converted or downloaded first if need be."""
    if source.kind == "embedded":
        folder = converted_folder(Path(EMBEDDED_FILE).stem, EMBEDDED_SHA256)
        return folder if is_converted(folder) else convert_gguf(embedded_gguf(report), progress=report)
    if source.path is None:
        cached = cached_snapshot(source.name, revision)
        return cached or download_snapshot(source.name, revision, check=check, progress=report)
    return convert_gguf(source.path, progress=report) if source.kind == "gguf" else source.path


def _check_folder(folder: Path, *, name: str, trust_remote_code: bool) -> None:
    """Refuse a model that cannot be compacted by its configuration and modules, before weights are read."""
    config = read_config(folder, name, trust_remote_code=trust_remote_code)
    check_supported(config)
    if not trust_remote_code:
        skeleton = read_skeleton(config, name)
        check_attention(skeleton)
        read_geometry(skeleton)


def _finish(causal_lm: Any, tokenizer: Any, source: ModelSource) -> LoadedModel:
    """Check a model with its weights, and read off it what compaction needs."""
    check_attention(causal_lm)
    geometry = read_geometry(causal_lm)
    causal_lm.eval()
    causal_lm.requires_grad_(False)
    return LoadedModel(
        causal_lm=causal_lm,
        tokenizer=tokenizer,
        geometry=geometry,
        source=source,
        fingerprint=model_fingerprint(causal_lm),
        tokenizer_hash=tokenizer_hash(tokenizer),
    )


def _ignore(_line: str) -> None:
    """A progress callback that does nothing."""
