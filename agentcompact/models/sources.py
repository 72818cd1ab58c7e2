"""Tell from a model's name where its weights come from, before anything is loaded or downloaded."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentcompact.errors import InputError, ModelNotFoundError

EMBEDDED_ALIAS = "smollm2"
SourceKind = Literal["embedded", "gguf", "folder", "hub", "memory"]

_GGUF_MAGIC = b"GGUF"
_HUB_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_HUB_PART}(?:/{_HUB_PART})?")
_HUB_ID_LENGTH = 96


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: `embedded` (the alias `smollm2`), `gguf` (a GGUF file), `folder` (a transformers folder),
            `hub` (a model id of the hub), or `memory` (a model object that the caller had already loaded).
        name: the name as it was given.
        path: the file or the folder, absolute; None for the other kinds.
        identity: a name that means the same model wherever it is used: the alias, the absolute path, or the
            hub id followed by `@revision` if a revision was asked for.
    """

    kind: SourceKind
    name: str
    path: Path | None
    identity: str


def resolve_source(name: str, *, revision: str | None = None) -> ModelSource:
    """Decide where the model called `name` is to be found. Touches the file system, never the network.

    Args:
        name: the alias `smollm2`, the path of a `.gguf` file, the path of a folder with a `config.json`, or
            a hub id (`name` or `owner/name`).
        revision: a branch, tag or commit of a hub model; None means its default branch.

    Raises:
        ModelNotFoundError: if `name` is none of these; the message says what is missing.
        InputError: if a revision is given for something that is not a hub model.
    """
    source = _local_source(name)
    if source is not None:
        if revision is not None:
            raise InputError(f"a revision can only be given for a hub model, and '{name}' is not one")
        return source
    if _looks_like_path(name):
        raise ModelNotFoundError(f"there is no model file or folder at '{name}'")
    _refuse_near_miss(name)
    if not _is_hub_id(name):
        raise ModelNotFoundError(
            f"'{name}' is neither '{EMBEDDED_ALIAS}', a .gguf file, a model folder, nor a hub id like 'owner/name'"
        )
    identity = name if revision is None else f"{name}@{revision}"
    return ModelSource("hub", name, None, identity)


def _local_source(name: str) -> ModelSource | None:
    """The source if `name` is the alias or an existing path, else None."""
    if name == EMBEDDED_ALIAS:
        return ModelSource("embedded", name, None, EMBEDDED_ALIAS)
    path = _existing_path(name)
    if path is None:
        return None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder '{name}' has no config.json, so it is not a transformers model")
        return ModelSource("folder", name, path, str(path))
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"'{name}' is a file, but neither a .gguf file nor a model folder")
    check_gguf_magic(path, name)
    return ModelSource("gguf", name, path, str(path))


def check_gguf_magic(path: Path, name: str) -> None:
    """Check that a file begins as every GGUF file does.

    Args:
        path: an existing file.
        name: what to call it in the message.

    Raises:
        ModelNotFoundError: if it cannot be read or is no GGUF file.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelNotFoundError(f"the file '{name}' cannot be read: {error.strerror or error}") from error
    if magic != _GGUF_MAGIC:
        raise ModelNotFoundError(f"the file '{name}' is not a GGUF file: it does not begin with 'GGUF'")


def _existing_path(name: str) -> Path | None:
    """The absolute path that `name` names, or None if nothing is there (or no path can be called that)."""
    if not name.strip():
        return None
    try:
        path = Path(name).expanduser()
        return path.absolute() if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _looks_like_path(name: str) -> bool:
    """Whether `name` can only have been meant as a path."""
    separators = [os.sep] if os.altsep is None else [os.sep, os.altsep]
    starts = tuple(start + separator for start in (".", "..", "") for separator in separators)
    return (
        name in (".", "..")
        or name.startswith((*starts, "~"))
        or name.lower().endswith(".gguf")
        or sum(name.count(separator) for separator in separators) >= 2
    )


def _refuse_near_miss(name: str) -> None:
    """Suggest the alias to a user who has nearly typed it; hub ids with an owner are left alone."""
    if "/" not in name and difflib.get_close_matches(name.lower(), [EMBEDDED_ALIAS], cutoff=0.7):
        raise ModelNotFoundError(f"there is no model '{name}'; did you mean '{EMBEDDED_ALIAS}'?")


def _is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id."""
    return len(name) <= _HUB_ID_LENGTH and _HUB_ID.fullmatch(name) is not None and "--" not in name and ".." not in name
