"""The conversations that a model holds: matched by message, forked where they part, bounded, spilled to disk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcompact.engines import Engine
from agentcompact.errors import InputError
from agentcompact.session.context import Context, HeldMessage, Item
from agentcompact.session.journal import Journal
from agentcompact.session.manager import MemoryManager
from agentcompact.session.policy import SessionPolicy
from agentcompact.session.rendering import ConversationTemplate
from agentcompact.session.state import SessionState, Snapshot


class SnapshotFolder(Journal):
    """A journal that keeps snapshots only, in a temporary folder: what was said comes with every call."""

    def add(self, kind: str, **data: Any) -> int:
        return 0


@dataclass
class State:
    """One conversation held. tools: which tools its template wrote. spilled: where its cache lies if not in memory."""

    manager: MemoryManager
    tools: str
    policy: SessionPolicy
    used: int = 0
    spilled: Snapshot | None = None
    border: int = 0
    """Of a spilled state: the position up to which its tokens are compacted."""

    @property
    def held(self) -> Sequence[HeldMessage]:
        return self.manager.context.held if self.spilled is None else self.spilled.held

    @property
    def is_compacted(self) -> bool:
        return (
            bool(self.manager.state.compactions)
            or (self.border if self.spilled is not None else self.manager.context.compacted_until) > 0
        )

    @property
    def keys(self) -> list[str]:
        return [message.key for message in self.held]

    @property
    def nbytes(self) -> int:
        return self.manager.cache.nbytes if self.spilled is None else 0


@dataclass
class Match:
    """The state that shares most with a conversation: its first `common` messages, of `tokens` positions."""

    state: State
    common: int
    tokens: float
    extends: bool = field(default=False)
    """Whether all that the state holds is part of the conversation."""


class StatePool:
    """All conversations of one model, the one used longest ago leaving memory first. Used under the model's lock."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        """journal: whose folder takes snapshots and what is spilled."""
        self.engine = engine
        self.journal = journal
        self.states: list[State] = []
        self._clock = itertools.count(1)

    def take(self, items: Sequence[Item], template: ConversationTemplate, tools: str, policy: SessionPolicy) -> State:
        """Return a state to go on from with a conversation; it is a new one, or a fork, unless it is extended.

        A compacted state serves only calls of the policy that compacted it, since another might not have.
        """
        match = self.best(items, tools, policy)
        if match is None:
            return self.adopt(self._new(template, policy), tools, policy)
        state = match.state
        try:
            self._bring_back(state)
        except InputError:  # its file is gone or damaged: its messages are read again
            self.drop(state)
            return self.take(items, template, tools, policy)
        if not match.extends:
            state = self.adopt(state.manager.fork(), tools, policy)
        state.used, state.policy = next(self._clock), policy
        state.manager.policy = policy
        return state

    def best(self, items: Sequence[Item], tools: str, policy: SessionPolicy) -> Match | None:
        """Return the match that saves most reading, or None where no state shares anything."""
        best: Match | None = None
        keys = [item.message.key for item in items]  # digests: made once, not once a state
        for state in self.states:
            if state.tools != tools or (state.is_compacted and not _same_policy(state.policy, policy)):
                continue
            match = _match(state, items, keys)
            if match is not None and (best is None or (match.tokens, state.used) > (best.tokens, best.state.used)):
                best = match
        return best

    def adopt(self, manager: MemoryManager, tools: str, policy: SessionPolicy) -> State:
        """Add a state."""
        state = State(manager, tools, policy, next(self._clock))
        self.states.append(state)
        return state

    def resumed(self, context: Context, template: ConversationTemplate, tools: str, policy: SessionPolicy) -> State:
        """Add a state whose compacted cache was read from a file."""
        manager = self._new(template, policy)
        context.cache.metadata.prompt = manager.prompt
        manager.context = context
        return self.adopt(manager, tools, policy)

    def _new(self, template: ConversationTemplate, policy: SessionPolicy) -> MemoryManager:
        return MemoryManager(self.engine, self.journal, SessionState(), policy, template.prompt_format())

    def drop(self, state: State) -> None:
        self.states = [each for each in self.states if each is not state]

    def trim(self, newest: State, most_states: int, most_bytes: int) -> None:
        """Drop states that hold the same as the newest, and let those used longest ago leave memory.

        most_states: kept in memory; as many again are kept on disk.
        """
        keys = newest.keys
        for state in self.states:
            if state is not newest and state.tools == newest.tools and state.keys == keys:
                self.drop(state)
        in_memory = sorted((s for s in self.states if s.spilled is None), key=lambda s: s.used, reverse=True)
        total = 0
        for number, state in enumerate(in_memory):
            total += state.nbytes
            if state is not newest and (number >= most_states or total > most_bytes):
                self._spill(state)
        on_disk = sorted((s for s in self.states if s.spilled is not None), key=lambda s: s.used, reverse=True)
        for state in on_disk[most_states:]:
            self.drop(state)
        self.journal.prune(0, self._needed())

    def _spill(self, state: State) -> None:
        """Write a state's cache into a file and free its memory; drop the state where there is nothing to write."""
        context = state.manager.context
        if not context.held or not state.policy.snapshot_bytes:
            self.drop(state)
            return
        name = self.journal.save(context.cache)
        self.journal.prune(state.policy.snapshot_bytes, {name})
        state.spilled, state.border = Snapshot(name, tuple(context.held), context.frozen), context.compacted_until
        state.manager.context = Context(self.engine)

    def _bring_back(self, state: State) -> None:
        if state.spilled is not None:
            cache = self.journal.load(state.spilled.name, self.engine)
            cache.metadata.prompt = state.manager.prompt
            state.manager.context = Context(self.engine, cache, state.spilled.held, state.spilled.frozen)
            state.spilled = None

    def _needed(self) -> set[str]:
        """Return the files that some state may still read."""
        names: set[str] = set()
        for state in self.states:
            names.update(each.before.name for each in state.manager.state.compactions)
            names.update([state.spilled.name] if state.spilled else [])
        return names


def _same_policy(one: SessionPolicy, other: SessionPolicy) -> bool:
    return one.model_dump() == other.model_dump()


def _match(state: State, items: Sequence[Item], keys: Sequence[str]) -> Match | None:
    """Compare a state with a conversation; None where nothing of it can be used."""
    if state.spilled is not None and not state.manager.journal.has(state.spilled.name):
        return None
    held, common = state.held, 0
    border = state.manager.context.compacted_until if state.spilled is None else state.border
    for item, key, each in zip(items, keys, held, strict=False):
        if each.key != key or (each.piece not in (None, item.piece) and each.stop > border):
            break
        common += 1
    if common == 0:
        return None
    tokens = float(held[common - 1].stop)
    if common < len(held) and held[common].start < border:
        # It lies behind a compaction: an older snapshot may do, and what that still holds is not known yet.
        if not any(state.manager.journal.has(each.before.name) for each in state.manager.state.compactions):
            return None
        tokens /= 2
    return Match(state, common, tokens, common == len(held))
