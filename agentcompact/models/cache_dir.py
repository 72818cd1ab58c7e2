"""The folder for what is downloaded and converted, and how things get into it whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from agentcompact.errors import WriteError

CACHE_DIR_VARIABLE = "AGENTCOMPACT_CACHE_DIR"
_STAGING_PREFIX = ".staging-"
_STALE_AFTER_SECONDS = 24 * 3600


def cache_root() -> Path:
    """The root of the user's agentcompact cache; it is not created here.

    Returns:
        The folder named by the environment variable `AGENTCOMPACT_CACHE_DIR` if that is set and not empty,
        otherwise the platform's user cache folder for `agentcompact`.
    """
    override = os.environ.get(CACHE_DIR_VARIABLE, "").strip()
    if override:
        return Path(override).expanduser().absolute()
    return platformdirs.user_cache_path("agentcompact")


def models_dir() -> Path:
    """The folder of `cache_root()` that holds model files and converted models; it is not created here."""
    return cache_root() / "models"


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Make a temporary folder beside the final place, and remove it whatever happens inside the block.

    Args:
        parent: the folder that will hold the finished thing; created if it is missing. Staging folders that a
            killed process left there more than a day ago are removed.

    Raises:
        WriteError: if `parent` cannot be created or written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=parent))
    except OSError as error:
        raise WriteError(f"cannot write to the cache folder {parent}: {error.strerror or error}") from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish_folder(staged: Path, final: Path, is_complete: Callable[[Path], bool]) -> None:
    """Move a finished folder to its final place by one rename.

    A process that finished the same folder earlier keeps its copy: the staged one is then left to be
    removed. A
    folder at the final place that is not complete is replaced.

    Args:
        staged: the finished folder, on the same file system as `final`.
        final: where it belongs.
        is_complete: says whether a folder at `final` can be used as it is.

    Raises:
        WriteError: if the folder cannot be moved there.
    """
    if final.exists() and not is_complete(final):
        shutil.rmtree(final, ignore_errors=True)
    try:
        staged.rename(final)
    except OSError as error:
        if not is_complete(final):
            raise WriteError(f"cannot write {final}: {error.strerror or error}") from error


def _remove_stale(parent: Path) -> None:
    """Remove staging folders that are older than a day; nobody is still writing them."""
    oldest = time.time() - _STALE_AFTER_SECONDS
    for folder in parent.glob(f"{_STAGING_PREFIX}*"):
        try:
            stale = folder.stat().st_mtime < oldest
        except FileNotFoundError:
            continue
        if stale:
            shutil.rmtree(folder, ignore_errors=True)
