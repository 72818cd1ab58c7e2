"""The writer's file: one safetensors file, no pickle, with what is needed to check that it fits a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agentcompact.cache.digest import tensors_digest
from agentcompact.errors import WriteError, WriterFileError, one_line
from agentcompact.files import atomic_output
from agentcompact.writers.fast_diamond import FastDiamond
from agentcompact.writers.settings import WriterSettings

if TYPE_CHECKING:
    from agentcompact.cache import CacheMetadata
    from agentcompact.models import ModelGeometry

FORMAT_VERSION = 1
FILE_NAME = "writer.safetensors"


class WriterRecord(BaseModel):
    """Everything of a writer that is no tensor: its settings, its model, and how it was trained."""

    version: int = Field(FORMAT_VERSION, ge=1)
    settings: WriterSettings
    model_source: str
    model_type: str
    model_fingerprint: str
    layers: int = Field(ge=1, description="the model's layers of full attention")
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    training: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of_model(cls, settings: WriterSettings, metadata: CacheMetadata, geometry: ModelGeometry) -> WriterRecord:
        return cls(
            settings=settings,
            model_source=metadata.model_source,
            model_type=metadata.model_type,
            model_fingerprint=metadata.model_fingerprint,
            layers=len(geometry.full_layers),
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
        )

    def new_writer(self, seed: int = 0) -> FastDiamond:
        """Return an untrained writer of these sizes."""
        return FastDiamond(self.settings, self.layers, self.kv_heads, self.head_dim, seed)

    def misfit(self, metadata: CacheMetadata, geometry: ModelGeometry) -> str | None:
        """Return why the writer does not fit a model, in a few words, or None."""
        mine = (self.layers, self.kv_heads, self.head_dim)
        theirs = (len(geometry.full_layers), geometry.kv_heads, geometry.head_dim)
        if mine != theirs:
            return ("it is for {} layers of {} KV heads of dimension {}, and the model has {} of {} of {}").format(
                *mine, *theirs
            )
        if self.model_fingerprint != metadata.model_fingerprint:
            return (
                f"it was trained for {self.model_source} ({self.model_fingerprint[:8]}), and this model is "
                f"{metadata.model_source} ({metadata.model_fingerprint[:8]})"
            )
        return None


def save_writer(
    writer: FastDiamond,
    record: WriterRecord,
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> Path:
    """Write a writer's file, whole or not at all. Raises OutputExistsError or WriteError."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in writer.named_parameters()}
    text = record.model_dump_json()
    with atomic_output(path, overwrite=overwrite, private=False) as temporary:
        try:
            save_file(tensors, temporary, {"agentcompact_writer": text, "digest": tensors_digest(text, tensors)})
        except SafetensorError as error:
            raise WriteError(f"{path} could not be written: {one_line(error)}") from error
    return path


def read_record(path: Path) -> WriterRecord:
    """Return what a writer's file says of itself, its tensors unread; raises as `load_writer` does."""
    return _open(path)[0]


def load_writer(path: Path) -> tuple[FastDiamond, WriterRecord]:
    """Read a writer, in float32 and without gradients, from its file or the folder it lies in.

    Raises WriterFileError where there is none, or it is damaged, of a newer version, or no writer.
    """
    path = path / FILE_NAME if path.is_dir() else path
    record, text, digest = _open(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WriterFileError(f"{path} is damaged: {one_line(error)}") from error
    if tensors_digest(text, tensors) != digest:
        raise WriterFileError(f"{path} is damaged: its content does not match its digest; copy or train it again")
    writer = record.new_writer()
    expected = {name: tensor.shape for name, tensor in writer.named_parameters()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise WriterFileError(f"{path} is no sound writer: its tensors do not have the sizes of its settings")
    if not all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise WriterFileError(f"{path} is no sound writer: it has numbers that are not finite")
    writer.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return writer.requires_grad_(False), record


def _open(path: Path) -> tuple[WriterRecord, str, str]:
    """Return a file's record, its text and the digest, after the checks that need no tensor."""
    if not path.is_file():
        raise WriterFileError(f"there is no writer at {path}: train one with agentcompact train-writer")
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WriterFileError(f"{path} is no writer, or is damaged: {one_line(error)}") from error
    text = stored.get("agentcompact_writer")
    if text is None or "digest" not in stored:
        raise WriterFileError(f"{path} is no writer: it was not written by agentcompact train-writer")
    return _record_of(path, text), text, stored["digest"]


def _record_of(path: Path, text: str) -> WriterRecord:
    try:
        version = json.loads(text)["version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise WriterFileError(
                f"{path} has version {version}, this release reads up to {FORMAT_VERSION}: upgrade agentcompact"
            )
        return WriterRecord.model_validate_json(text)
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WriterFileError(f"{path} is damaged: what it says of itself cannot be read") from error
