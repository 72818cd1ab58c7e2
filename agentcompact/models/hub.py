"""Fetch a model from the Hugging Face hub, or say within seconds why that cannot be done."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub import errors as hub_errors

from agentcompact.errors import ModelNotFoundError, WriteError
from agentcompact.models.folder import is_loadable, shard_names
from agentcompact.models.quiet import one_line, quiet_hub

REQUEST_SECONDS = 4.0
PREFLIGHT_SECONDS = 9.0
_SMALL_FILES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# `HTTPError` is what the hub's HTTP client raises when no answer comes; which client that is has changed.
_HUB_ERRORS: tuple[type[BaseException], ...] = (
    hub_errors.HTTPError,
    hub_errors.EntryNotFoundError,
    OSError,
    ValueError,
    RuntimeError,
)


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a hub model that is already on this computer as a whole, or None. No network is used."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if is_loadable(folder) else None


def download_snapshot(
    name: str,
    revision: str | None,
    *,
    check: Callable[[Path], None],
    progress: Callable[[str], None],
) -> Path:
    """Download a hub model into the hub's own cache.

    Args:
        name: the hub id.
        revision: a branch, tag or commit; None means the default branch.
        check: called with the folder when it holds everything but the weights; raises to stop there.
        progress: called with one line before each step. The hub's own progress bars show the weights coming.

    Returns:
        The folder of the snapshot.

    Raises:
        ModelNotFoundError: if the hub cannot be reached within about nine seconds, does not have the model
            or the revision, asks for a licence to be accepted first, or has no weights that transformers
            reads.
        WriteError: if the disk is full.
    """
    progress(f"asking the hub for {name}")
    try:
        files = _within(PREFLIGHT_SECONDS, lambda: _list_files(name, revision))
        small = [file for file in files if "/" not in file and file.endswith(_SMALL_FILES)]
        if "config.json" not in small:
            raise _not_a_model(name, files)
        with quiet_hub():
            folder = Path(_download(name, revision, small))
        check(folder)
        weights = _weights(folder, files)
        if not weights:
            raise _not_a_model(name, files)
        progress(f"downloading {name} ({len(weights)} weight file{'s' if len(weights) > 1 else ''})")
        with quiet_hub(bars=True):
            return Path(_download(name, revision, small + weights))
    except _HUB_ERRORS as error:
        raise _explain(name, revision, error) from error


def _list_files(name: str, revision: str | None) -> list[str]:
    """The names of a model's files, asked for without retries.

    `config.json` is asked about as well: a gated model lists its files to everyone, but gives none of them,
    and a server that hangs there would later be retried for minutes.
    """
    info = HfApi().model_info(name, revision=revision, timeout=REQUEST_SECONDS)
    files = [str(sibling.rfilename) for sibling in info.siblings or []]
    if "config.json" in files:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=REQUEST_SECONDS)
    return files


def _download(name: str, revision: str | None, files: list[str]) -> str:
    """Download these files of a model, and return the folder they are in."""
    return str(snapshot_download(name, revision=revision, allow_patterns=files, etag_timeout=REQUEST_SECONDS))


def _weights(folder: Path, files: list[str]) -> list[str]:
    """The weight files that transformers would read: safetensors if there are any, whole or in shards."""
    for single in _WEIGHT_FILES:
        if single in files:
            return [single]
        if f"{single}.index.json" in files:
            return shard_names(folder / f"{single}.index.json")
    return []


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, or a TimeoutError after `seconds`.

    A request's own timeout does not cover looking a host's name up, so it runs in a thread that can be left
    behind.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except _HUB_ERRORS as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="agentcompact-hub").start()
    try:
        return future.result(timeout=seconds)
    except FutureTimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _not_a_model(name: str, files: list[str]) -> ModelNotFoundError:
    """The error for a repository that transformers cannot load."""
    if any(file.lower().endswith(".gguf") for file in files):
        return ModelNotFoundError(
            f"'{name}' holds GGUF files only; download one of them and pass the path of that .gguf file"
        )
    return ModelNotFoundError(f"'{name}' is on the hub, but has no config.json with weights for transformers")


def _explain(name: str, revision: str | None, error: BaseException) -> ModelNotFoundError | WriteError:
    """Turn what the hub's library raised into one line that says what to do."""
    if isinstance(error, hub_errors.GatedRepoError):
        return ModelNotFoundError(f"the model '{name}' is gated: accept the licence on its hub page, then set HF_TOKEN")
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model '{name}' (if it is private, set HF_TOKEN to a token that may read it)"
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return ModelNotFoundError(f"the model '{name}' has no revision '{revision}'")
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return ModelNotFoundError(f"the model '{name}' is not in the local hub cache, and HF_HUB_OFFLINE is set")
    if isinstance(error, hub_errors.HfHubHTTPError):
        return ModelNotFoundError(f"the hub refused to give '{name}': {one_line(error)}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return WriteError(f"the disk is full while '{name}' is downloaded")
    if isinstance(error, ValueError):
        return ModelNotFoundError(f"the hub's answer about '{name}' makes no sense: {one_line(error)}")
    return ModelNotFoundError(
        f"the hub cannot be reached to fetch '{name}' ({one_line(error)}); "
        "check the connection, or use 'smollm2', a model folder or a .gguf file"
    )
