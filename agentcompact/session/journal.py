"""What happened in a session, append-only in one SQLite file, and the cache snapshots beside it.

Every row is an event; nothing is ever changed or deleted, so the transcript survives whatever a compaction does. A
session without a folder keeps its journal in memory and its snapshots in a temporary folder.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine
from agentcompact.errors import DocumentError, InputError, WriteError

DATABASE = "session.db"
SNAPSHOTS = "snapshots"
LOCK = "session.lock"
HOLDER = "session.pid"


@dataclass(frozen=True)
class Event:
    """One thing that happened. number: ascending, from 1."""

    number: int
    at: str
    kind: str
    data: dict[str, Any]


class Journal:
    """The events of one session; this process alone writes to it while it is open."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises InputError where another process holds the session, WriteError where it cannot be written."""
        self.folder = folder
        self._temporary = tempfile.TemporaryDirectory(prefix="agentcompact-") if folder is None else None
        self.snapshots = Path(self._temporary.name) if self._temporary else Path(str(folder)) / SNAPSHOTS
        self._lock: FileLock | None = None
        if folder is not None:
            try:
                self.snapshots.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise WriteError(f"the session {folder} cannot be made: {error.strerror or error}") from error
            self._lock = _locked(folder)
        try:
            self._database = _connected(":memory:" if folder is None else folder / DATABASE)
        except BaseException:
            self.close()
            raise

    def add(self, kind: str, **data: Any) -> int:
        """Append an event; it is on disk when this returns. Raises WriteError where it cannot be written."""
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            with self._database:
                row = self._database.execute(
                    "INSERT INTO journal (at, kind, data) VALUES (?, ?, ?)",
                    (at, kind, json.dumps(data, ensure_ascii=False)),
                )
        except sqlite3.Error as error:
            raise WriteError(f"the session's journal could not be written: {error}") from error
        return int(row.lastrowid or 0)

    def events(self) -> Iterator[Event]:
        """Give all events in order."""
        yield from _rows(self._database)

    def save(self, cache: CompactedCache) -> str:
        """Write a snapshot and return its name."""
        name = f"{uuid.uuid4().hex}.kv"
        cache.save(self.snapshots / name)
        return name

    def load(self, name: str, engine: Engine) -> CompactedCache:
        """Read a snapshot. Raises DocumentError where it is gone, CacheFileError where it is damaged or of another."""
        return engine.load_cache(self.snapshots / name)

    def has(self, name: str) -> bool:
        return bool(name) and (self.snapshots / name).is_file()

    def prune(self, limit: int, needed: set[str]) -> None:
        """Delete the oldest snapshots until they take at most `limit` bytes; those that are needed stay."""
        files = sorted(self.snapshots.glob("*.kv"), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > limit and path.name not in needed:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the session free for others."""
        database = getattr(self, "_database", None)
        if database is not None:
            database.close()
        if self._lock is not None and self._lock.is_locked:
            with suppress(OSError):
                (Path(str(self.folder)) / HOLDER).unlink(missing_ok=True)
            self._lock.release()
        if self._temporary is not None:
            self._temporary.cleanup()


def read_events(folder: Path) -> list[Event]:
    """Read a session's events without opening it for writing. Raises DocumentError where there is no such session."""
    path = folder / DATABASE
    if not path.is_file():
        raise DocumentError(f"there is no session {folder.name}")
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise DocumentError(f"{path} cannot be read: {error}") from error
    with closing(database):
        return list(_rows(database))


def holder_of(folder: Path) -> int | None:
    """Return the process that holds a session, or None where nobody does."""
    if not (folder / LOCK).exists():
        return None
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _holder(folder)
    lock.release()
    return None


def _locked(folder: Path) -> FileLock:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"the session {folder.name} is open in process {_holder(folder) or 'unknown'}: close it there first"
        ) from error
    except OSError as error:
        raise WriteError(f"the session {folder} cannot be written to: {error.strerror or error}") from error
    try:
        (folder / HOLDER).write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        lock.release()
        raise WriteError(f"the session {folder} cannot be written to: {error.strerror or error}") from error
    return lock


def _holder(folder: Path) -> int | None:
    try:
        return int((folder / HOLDER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _connected(path: Path | str) -> sqlite3.Connection:
    try:
        database = sqlite3.connect(path, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        with database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS journal "
                "(number INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL)"
            )
    except sqlite3.Error as error:
        raise DocumentError(f"{path} is no session journal: {error}") from error
    return database


def _rows(database: sqlite3.Connection) -> Iterator[Event]:
    try:
        for number, at, kind, data in database.execute("SELECT number, at, kind, data FROM journal ORDER BY number"):
            yield Event(number, at, kind, json.loads(data))
    except (sqlite3.Error, ValueError) as error:
        raise DocumentError(f"the session's journal is damaged: {error}") from error
