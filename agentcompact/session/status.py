"""What a session holds, in figures: by kind, and message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcompact.cache import CompactedCache
from agentcompact.session.context import HeldMessage
from agentcompact.session.messages import Message
from agentcompact.session.planning import held_in


@dataclass(frozen=True)
class MessageStatus:
    """One message. entries: held positions that stand for it. state: "compacted", "live" or "unread"."""

    number: int
    role: str
    tokens: int
    entries: float
    nbytes: int
    state: str
    pinned: bool
    text: str


@dataclass(frozen=True)
class SessionStatus:
    """Held positions by kind, and the limits. logical: the next position, which never falls by compaction alone."""

    window: int
    trigger: int
    system: float
    pinned: float
    compacted: float
    live: float
    logical: int
    limit: int
    nbytes: int
    compactions: int
    paused: str
    auto: bool

    @property
    def held(self) -> float:
        return self.system + self.pinned + self.compacted + self.live

    @property
    def free(self) -> float:
        return max(0.0, self.window - self.held)

    @property
    def near_trigger(self) -> bool:
        """Whether nine tenths of the trigger are reached: the next message may bring a compaction."""
        return self.auto and not self.paused and self.held >= 0.9 * self.trigger


def message_table(
    messages: Sequence[Message], held: Sequence[HeldMessage], cache: CompactedCache, pinned: set[int], border: int
) -> list[MessageStatus]:
    """Return the status of every message; border: the position up to which tokens are compacted."""
    each_position = cache.nbytes / max(1.0, cache.held_positions)
    rows = []
    for index, message in enumerate(messages):
        place = held[index] if index < len(held) and held[index].key == message.key else None
        entries = 0.0 if place is None or place.start == place.stop else held_in(cache, place.start, place.stop)
        tokens = 0 if place is None else place.stop - place.start
        state = "unread" if place is None else ("compacted" if place.stop <= border and entries < tokens else "live")
        rows.append(
            MessageStatus(
                number=index + 1,
                role=message.role,
                tokens=tokens,
                entries=entries,
                nbytes=round(entries * each_position),
                state=state,
                pinned=index in pinned,
                text=message.content or ", ".join(f"{call.name}(…)" for call in message.tool_calls),
            )
        )
    return rows


def by_kind(rows: Sequence[MessageStatus]) -> dict[str, float]:
    """Sum the held positions of messages as system, pinned, compacted or live."""
    sums = {"system": 0.0, "pinned": 0.0, "compacted": 0.0, "live": 0.0}
    for row in rows:
        kind = "system" if row.role == "system" else "pinned" if row.pinned else row.state
        if kind in sums:
            sums[kind] += row.entries
    return sums
