"""The results folder: one line a cell in `results.jsonl`, appended and flushed, so that nothing measured is lost."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from agentcompact.errors import DocumentError, InputError, WriteError
from agentcompact.evaluation.records import Document, to_lines
from agentcompact.evaluation.results import CellKey, CellResult, latest
from agentcompact.files import atomic_output

RESULTS = "results.jsonl"
DOCUMENTS = "documents"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"


class ResultStore:
    """A results folder that this process alone writes to; made by `open_store`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cells, cut_off = read_results(folder) if (folder / RESULTS).exists() else ([], False)
        self.cells = latest(cells)
        """The result of each cell that counts."""
        if cut_off:
            _drop_last_line(folder / RESULTS)

    def add(self, cell: CellResult) -> None:
        """Append a result; it is on disk when this returns. Raises WriteError where it cannot be written."""
        line = cell.model_dump_json(exclude_defaults=True) + "\n"
        try:
            with open(self.folder / RESULTS, "a", encoding="utf-8", opener=_private) as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(f"{self.folder / RESULTS} could not be written: {error.strerror or error}") from error
        self.cells = latest([*self.cells.values(), cell])

    def checkpoints(self, key: CellKey) -> Path:
        """Return the folder in which a cell's strategy may keep what it has reached, not made yet."""
        return self.folder / CHECKPOINTS / hashlib.sha256(repr(key).encode()).hexdigest()[:24]

    def drop_checkpoints(self, key: CellKey) -> None:
        """Remove a cell's checkpoints, once its result is written."""
        shutil.rmtree(self.checkpoints(key), ignore_errors=True)
        with suppress(OSError):  # other cells have theirs there, or there is none
            (self.folder / CHECKPOINTS).rmdir()

    def keep_document(self, document: Document) -> None:
        """Keep a document beside its results, under a name that says which it is."""
        folder = self.folder / DOCUMENTS
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in document.id)[:80]
        path = folder / f"{safe}-{document.digest}.jsonl"
        if not path.exists():
            _make_folder(folder)
            with atomic_output(path, overwrite=True) as temporary:
                temporary.write_text(to_lines([document]), encoding="utf-8")


@contextmanager
def open_store(folder: Path) -> Iterator[ResultStore]:
    """Open a results folder, made where it does not exist; what a killed run left half-written is dropped.

    Raises InputError where another process writes to it, WriteError where it cannot be written, DocumentError where
    it holds lines that are no results.
    """
    _make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"{folder} is being written to by another evaluation: wait, or name another folder") from error
    except OSError as error:
        raise WriteError(f"{folder} cannot be written to: {error.strerror or error}") from error
    try:
        yield ResultStore(folder)
    finally:
        lock.release()


def read_results(folder: Path) -> tuple[list[CellResult], bool]:
    """Return all results of a folder in the order written, and whether the last line was cut off (and left out).

    Raises DocumentError where there are none, or for a line that is no result.
    """
    path = folder / RESULTS
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DocumentError(f"{folder} holds no results: there is no {RESULTS} in it") from error
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}") from error
    *lines, rest = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    cells = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                cells.append(CellResult.model_validate_json(line))
            except ValidationError as error:
                raise DocumentError(
                    f"{path} line {number} is no result ({error.errors()[0]['msg']}): take that line out"
                ) from error
    return cells, bool(rest)


def check_folder(folder: Path) -> None:
    """Raise InputError for a place that cannot become a results folder; nothing is made."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder for the results")
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise InputError(f"{nearest} is a file: name another folder for the results")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"the folder {nearest} cannot be written to: name another one for the results")


def _private(path: str, flags: int) -> int:
    """Open a file that is readable by its owner only, since it holds what a document's questions were answered."""
    return os.open(path, flags, 0o600)


def _drop_last_line(path: Path) -> None:
    """Cut the file behind its last whole line."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"the folder {folder} cannot be made: {error.strerror or error}") from error
