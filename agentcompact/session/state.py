"""What a session is, as its journal tells it: messages, pins, compactions that can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError

from agentcompact.errors import DocumentError
from agentcompact.session.compaction import CompactionReport
from agentcompact.session.context import HeldMessage, ReplyTokens
from agentcompact.session.journal import Event
from agentcompact.session.messages import Message


@dataclass(frozen=True)
class Snapshot:
    """A cache file of a session, and the messages that its cache holds. name: "" where none was kept.

    frozen: the position up to which messages were rewritten by a strategy and cannot be told apart.
    """

    name: str
    held: tuple[HeldMessage, ...] = ()
    frozen: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "held": [asdict(message) for message in self.held], "frozen": self.frozen}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Snapshot:
        held = tuple(HeldMessage(**{**each, "unread": tuple(each["unread"])}) for each in data["held"])
        return cls(str(data["name"]), held, int(data["frozen"]))


@dataclass(frozen=True)
class Compaction:
    """A compaction that happened: its report, and the cache before it."""

    report: CompactionReport
    before: Snapshot


@dataclass
class SessionState:
    """The messages and what is known of them; a change is an event that `apply` carries out.

    replies: the tokens of generated replies, by message number. latest: the last cache that was saved, or None.
    """

    created: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    replies: dict[int, ReplyTokens] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    compactions: list[Compaction] = field(default_factory=list)
    reports: list[CompactionReport] = field(default_factory=list)
    latest: Snapshot | None = None
    was_undone: bool = False
    """Whether the last thing that a person did to the memory was to undo a compaction."""

    def apply(self, kind: str, data: dict[str, Any]) -> None:
        """Carry out one event of the journal."""
        if kind == "created":
            self.created = data
        elif kind == "message":
            self._append(data)
        elif kind == "replaced":
            pinned = data["count"] in self.pinned
            self._truncate(data["count"])
            self._append(data)
            if pinned:
                self.pinned.add(data["count"])
        elif kind == "truncated":
            self._truncate(data["count"])
        elif kind == "pinned":
            (self.pinned.add if data["pinned"] else self.pinned.discard)(data["index"])
        elif kind == "compacted":
            report = CompactionReport.model_validate(data["report"])
            self.compactions.append(Compaction(report, Snapshot.from_json(data["before"])))
            self.reports.append(report)
            self.latest = Snapshot.from_json(data["after"])
            self.was_undone = False
        elif kind == "undone":
            self.latest = self.compactions.pop().before
            self.was_undone = data.get("by") == "person"
        elif kind == "saved":
            self.latest = Snapshot.from_json(data["snapshot"])
        elif kind == "cleared":
            self._truncate(data["count"])
            self.compactions.clear()
            self.latest, self.was_undone = None, False

    def _append(self, data: dict[str, Any]) -> None:
        message = Message.model_validate(data["message"])
        if data.get("reply"):
            begun, ids = data["reply"]["begun"], data["reply"]["token_ids"]
            self.replies[len(self.messages)] = ReplyTokens(str(begun), tuple(map(int, ids)))
        self.messages.append(message)

    def _truncate(self, count: int) -> None:
        if not 0 <= count <= len(self.messages):
            raise ValueError(f"there are {len(self.messages)} messages, not {count}")
        del self.messages[count:]
        self.replies = {index: reply for index, reply in self.replies.items() if index < count}
        self.pinned = {index for index in self.pinned if index < count}


def replay(events: Iterable[Event]) -> SessionState:
    """Return the state that a journal's events lead to. Raises DocumentError for one that makes no sense."""
    state = SessionState()
    for event in events:
        try:
            state.apply(event.kind, event.data)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, ValidationError) as error:
            raise DocumentError(f"event {event.number} of the session's journal cannot be read: {error}") from error
    return state
