"""Turn a GGUF file into a transformers folder once, and keep that folder in the user's cache."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from agentcompact.errors import ModelNotFoundError, WriteError
from agentcompact.models.cache_dir import models_dir, publish_folder, staging_folder
from agentcompact.models.embedded import file_sha256
from agentcompact.models.folder import READ_ERRORS, reason_of, refuse_missing_tensors
from agentcompact.models.quiet import one_line, quiet_transformers
from agentcompact.models.sources import check_gguf_magic
from agentcompact.models.support import check_supported

_DIGITS = 16
# A damaged file raises these as well.
_READ_ERRORS: tuple[type[BaseException], ...] = (*READ_ERRORS, OverflowError, MemoryError, struct.error)


def convert_gguf(path: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """Convert a GGUF file into a safetensors folder, or find the folder of an earlier conversion.

    The weights are dequantised to float32, so the folder takes four bytes a parameter. It appears whole or
    not at
    all: it is written beside its final place and renamed.

    Args:
        path: the GGUF file.
        progress: called with one line before each step that takes seconds.

    Returns:
        The folder `<cache>/models/<stem of the file>-<16 digits of its SHA-256>`.

    Raises:
        ModelNotFoundError: if the file cannot be read, is damaged, or is of an architecture that transformers
            cannot read from GGUF.
        UnsupportedModelError: if the architecture cannot be compacted.
        WriteError: if the cache folder cannot be written.
    """
    check_gguf_magic(path, str(path))
    final = converted_folder(path.stem, file_sha256(path))
    if is_converted(final):
        return final
    with staging_folder(final.parent) as staging:
        converted = staging / "converted"
        _convert(path, staging, converted, progress or _ignore)
        publish_folder(converted, final, is_converted)
    return final


def converted_folder(stem: str, sha256: str) -> Path:
    """Where the conversion of a file with this stem and this SHA-256 is kept; it need not exist."""
    return models_dir() / f"{stem}-{sha256[:_DIGITS]}"


def is_converted(folder: Path) -> bool:
    """Whether a folder holds a finished conversion: a configuration, a tokenizer and weights."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (
        (folder / "config.json").is_file()
        and (folder / "tokenizer_config.json").is_file()
        and any((folder / name).is_file() for name in weights)
    )


def _convert(path: Path, staging: Path, converted: Path, progress: Callable[[str], None]) -> None:
    """Read configuration, tokenizer and weights out of the file, and save them to `converted`."""
    folder, name = _isolated(path, staging)
    options: dict[str, Any] = {"gguf_file": name, "local_files_only": True}
    progress(f"converting {path.name} (once): reading the file")
    with quiet_transformers(streams=True):
        try:
            config = AutoConfig.from_pretrained(folder, **options)
        except _READ_ERRORS as error:
            raise _unreadable(path, error) from error
    check_supported(config)
    progress(f"converting {path.name} (once): tokenizer")
    _step(path, converted, lambda: AutoTokenizer.from_pretrained(folder, **options))
    progress(f"converting {path.name} (once): weights")
    options["quantization_config"] = GgufConfig(dequantize=True)
    _step(path, converted, lambda: _read_weights(path, folder, options))


def _step(path: Path, converted: Path, read: Callable[[], Any]) -> None:
    """Read one part of the file and save it, with each failure told apart."""
    with quiet_transformers(streams=True):
        try:
            part = read()
        except _READ_ERRORS as error:
            raise _unreadable(path, error) from error
        try:
            part.save_pretrained(converted)
        except (OSError, SafetensorError) as error:
            raise WriteError(f"cannot write the converted model to {converted.parent}: {one_line(error)}") from error


def _read_weights(path: Path, folder: Path, options: dict[str, Any]) -> Any:
    """The dequantised model, refused if the file lacks one of its tensors."""
    causal_lm, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    refuse_missing_tensors(report, str(path))
    return causal_lm


def _isolated(path: Path, staging: Path) -> tuple[Path, str]:
    """A folder that holds nothing but the file, so that no tokenizer or configuration beside it is picked up.

    Falls back to the file's own folder where links cannot be made.
    """
    alone = staging / "gguf"
    try:
        alone.mkdir()
        (alone / path.name).symlink_to(path.resolve())
    except OSError:
        shutil.rmtree(alone, ignore_errors=True)
        return path.parent, path.name
    return alone, path.name


def _unreadable(path: Path, error: BaseException) -> ModelNotFoundError:
    """The error for a file that transformers cannot read."""
    reason = reason_of(error)
    if isinstance(error, ImportError):
        return ModelNotFoundError(f"'{path}' cannot be converted, a package is missing: {reason}")
    if "GGUF model with architecture" in reason:
        return ModelNotFoundError(f"'{path}' cannot be converted: {reason}")
    if "valid JSON" in reason:  # how transformers puts it that the file's own header made no sense
        reason = "its header cannot be read"
    return ModelNotFoundError(f"'{path}' is damaged or of a kind that transformers cannot convert: {reason}")


def _ignore(_line: str) -> None:
    """A progress callback that does nothing."""
