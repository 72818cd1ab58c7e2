"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agentcompact.errors import OutputExistsError, WriteError

PART = ".part"
STALE_SECONDS = 3600


def check_output(path: Path, *, overwrite: bool) -> None:
    """Raise OutputExistsError or WriteError if `path` cannot become an output file; nothing is touched."""
    if path.is_dir():
        raise WriteError(f"{path} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        raise WriteError(f"{path} is no regular file: name one that can be replaced as a whole")
    if path.exists() and not overwrite:
        raise OutputExistsError(
            f"{path} exists already: add --force (overwrite=True) to replace it, or name another file"
        )
    if not path.parent.is_dir():
        raise WriteError(f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise WriteError(f"the folder {path.parent} cannot be written to")


@contextlib.contextmanager
def atomic_output(path: Path, *, overwrite: bool, private: bool = True) -> Iterator[Path]:
    """Give a temporary file beside `path` that takes the name when the block ends well.

    private: readable by its owner only, since it may hold what a document says; else as the system makes files.

    After an error or an interruption nothing is left. Without `overwrite` a file that appeared meanwhile is kept
    and OutputExistsError raised; whatever the system refuses becomes a WriteError of one line.
    """
    check_output(path, overwrite=overwrite)
    temporary: Path | None = None
    prefix = f".{path.name.encode()[:60].decode(errors='ignore')}."
    try:
        _remove_stale(path.parent, prefix)
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=PART, dir=path.parent)
        temporary = Path(name)
        os.close(handle)
        yield temporary
        temporary.chmod(0o600 if private else 0o666 & ~_umask())
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            _rename_to_new(temporary, path)
    except OSError as error:
        raise WriteError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The permissions that this process takes from new files; reading them means setting them for a moment."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _rename_to_new(temporary: Path, path: Path) -> None:
    """Give the file its name unless that is taken."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError as error:
        raise OutputExistsError(f"{path} was made by another program meanwhile: nothing was overwritten") from error
    except OSError:  # a file system without hard links: claim the name first
        try:
            path.touch(exist_ok=False)
        except FileExistsError as error:
            raise OutputExistsError(f"{path} was made by another program meanwhile: nothing was overwritten") from error
        temporary.replace(path)


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove what a killed process left of the same output, if nobody has written to it for a while."""
    for left in folder.iterdir():
        if left.name.startswith(prefix) and left.name.endswith(PART):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()
