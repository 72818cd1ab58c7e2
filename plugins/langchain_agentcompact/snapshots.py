"""Compacted caches on disk that another process can go on from."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine
from agentcompact.errors import InputError, WriteError
from agentcompact.files import atomic_output
from agentcompact.models import cache_root
from agentcompact.session.context import Context
from agentcompact.session.messages import Message
from agentcompact.session.state import Snapshot

_NAME = re.compile(r"[0-9a-f]{32}")


class SnapshotHandle(BaseModel):
    """What an agent's state keeps of a snapshot.

    digest: of the messages it holds; messages: how many those are; fingerprint: of the model's weights; tools: digest
    of the tools that its prompt describes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot: str
    digest: str
    messages: int
    fingerprint: str
    tools: str


def digest_of(keys: Sequence[str]) -> str:
    """Return a digest of messages, by their keys."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


class SnapshotStore:
    """A folder of snapshots. They hold what was said, so only their owner can read them."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: by default `langchain` in the user's agentcompact cache; made when something is saved."""
        self.folder = folder or cache_root() / "langchain"

    def save(self, context: Context, tools: str, limit: int) -> SnapshotHandle:
        """Write what a context holds; the oldest snapshots go until all take at most `limit` bytes.

        Raises WriteError where the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise WriteError(f"the folder {self.folder} cannot be made: {error.strerror or error}") from error
        name = uuid.uuid4().hex
        context.cache.save(self._cache(name))
        with atomic_output(self._messages(name), overwrite=False) as path:
            snapshot = Snapshot(name, tuple(context.held), context.frozen)
            path.write_text(json.dumps(snapshot.to_json()), encoding="utf-8")
        self._prune(limit, name)
        return SnapshotHandle(
            snapshot=name,
            digest=digest_of([held.key for held in context.held]),
            messages=len(context.held),
            fingerprint=engine_fingerprint(context.engine),
            tools=tools,
        )

    def load(self, handle: SnapshotHandle, engine: Engine, messages: Sequence[Message], tools: str) -> Context | None:
        """Return the context of a snapshot; None where it is gone, or is not of these messages, tools and model."""
        if _NAME.fullmatch(handle.snapshot) is None or handle.tools != tools:
            return None
        if handle.fingerprint != engine_fingerprint(engine):
            return None
        if digest_of([message.key for message in messages[: handle.messages]]) != handle.digest:
            return None
        try:
            data = json.loads(self._messages(handle.snapshot).read_text(encoding="utf-8"))
            snapshot = Snapshot.from_json(data)
            cache: CompactedCache = engine.load_cache(self._cache(handle.snapshot))
        except (OSError, ValueError, KeyError, TypeError, InputError):
            return None
        if digest_of([held.key for held in snapshot.held]) != handle.digest:
            return None
        return Context(engine, cache, snapshot.held, snapshot.frozen)

    def _cache(self, name: str) -> Path:
        return self.folder / f"{name}.kv"

    def _messages(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _prune(self, limit: int, newest: str) -> None:
        files = sorted(self.folder.glob("*.kv"), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > limit and path.stem != newest:
                path.unlink(missing_ok=True)
                self._messages(path.stem).unlink(missing_ok=True)


def engine_fingerprint(engine: Engine) -> str:
    """Return the hash of an engine's weights."""
    return engine.describe().model_fingerprint


def read_handle(value: object) -> SnapshotHandle | None:
    """Return a handle as a checkpointer gives it back; None where it is none."""
    try:
        return SnapshotHandle.model_validate(value)
    except ValidationError:
        return None
