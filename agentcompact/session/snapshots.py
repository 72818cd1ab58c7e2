"""A context on disk: a cache file beside the journal, with the messages that it holds."""

from __future__ import annotations

from agentcompact.engines import Engine
from agentcompact.errors import DocumentError
from agentcompact.session.context import Context
from agentcompact.session.journal import Journal
from agentcompact.session.state import Snapshot


def keep_snapshot(journal: Journal, context: Context) -> Snapshot:
    """Write a context's cache, and return what tells of it. Raises WriteError where it cannot be written."""
    return described(context, journal.save(context.cache))


def described(context: Context, name: str = "") -> Snapshot:
    """Return what tells of a context whose cache lies in the file `name`, or in none."""
    return Snapshot(name, tuple(context.held), context.frozen)


def load_snapshot(journal: Journal, engine: Engine, snapshot: Snapshot) -> Context:
    """Return the context that a snapshot tells of.

    Raises DocumentError where its file is gone or of another moment, CacheFileError where it is damaged.
    """
    cache = journal.load(snapshot.name, engine)
    if cache.next_position != (snapshot.held[-1].stop if snapshot.held else 0):
        raise DocumentError(f"the snapshot {snapshot.name} is not the one that the journal tells of")
    return Context(engine, cache, snapshot.held, snapshot.frozen)
