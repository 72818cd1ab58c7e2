"""What of a conversation is in the cache: which message holds which positions, and what must be read next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine, Progress
from agentcompact.errors import CacheError
from agentcompact.session.control_text import ControlText
from agentcompact.session.messages import Message


@dataclass(frozen=True)
class ReplyTokens:
    """A reply as the model generated it: what the template wrote to begin it, and its token ids without the end's."""

    begun: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """A message with the piece of the template's text that is its own, and the tokens it was generated as, if it was.

    ending: what the template writes behind an assistant's content.
    """

    message: Message
    piece: str
    reply: ReplyTokens | None = None
    ending: str = ""


@dataclass(frozen=True)
class HeldMessage:
    """A message that holds the positions [start, stop) of the cache.

    piece: the text that was read for it; None for a reply that was decoded and not yet closed.
    unread: tokens of such a reply that the cache does not hold yet.
    """

    key: str
    piece: str | None
    start: int
    stop: int
    unread: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reading:
    """What must be read so that the cache holds a conversation.

    common: messages that stay. closing: tokens that end the last of those. new: the other messages with their tokens.
    changed: compacted messages that the template writes otherwise by now, which stay as they were.
    """

    common: int
    closing: list[int] = field(default_factory=list)
    closed: Item | None = None
    new: list[tuple[Item, list[int]]] = field(default_factory=list)
    changed: int = 0

    @property
    def tokens(self) -> int:
        return len(self.closing) + sum(len(ids) for _, ids in self.new)


class BehindSpanError(CacheError):
    """A message is to change whose tokens the cache cannot go back to."""


class Context:
    """A cache and the messages in it, matched by message so that nothing is read twice."""

    def __init__(
        self,
        engine: Engine,
        cache: CompactedCache | None = None,
        held: Sequence[HeldMessage] = (),
        frozen: int = 0,
    ) -> None:
        """frozen: the position up to which a strategy wrote a text of its own, so that no message is left in it."""
        self.engine = engine
        self.cache = engine.new_cache() if cache is None else cache
        self.held = list(held)
        self.frozen = frozen
        self._controls = ControlText(engine.control_strings())

    def fork(self) -> Context:
        """Return a context that shares what is held and goes its own way from here."""
        return Context(self.engine, self.cache.fork(), self.held, self.frozen)

    @property
    def compacted_until(self) -> int:
        """The position up to which tokens stand together and none can be taken out."""
        return max(self.cache.span_tokens, self.frozen)

    def reading(self, items: Sequence[Item]) -> Reading:
        """Find out what of a conversation is there, and the tokens of what is not."""
        common, changed = 0, 0
        closing: list[int] = []
        closed: Item | None = None
        for item, held in zip(items, self.held, strict=False):
            if held.key != item.message.key:
                break
            if held.piece is None:
                rest = after_reply(item)
                if rest is None:
                    break
                closing, closed = [*held.unread, *self._encode(rest)], item
            elif held.piece != item.piece:
                if held.stop > self.compacted_until:
                    break
                changed += 1
            common += 1
        while common < len(self.held) and common and self.held[common - 1].piece == "":
            common -= 1  # its text is in the next message's piece, which goes
        if common < len(self.held):
            closing, closed = ([], None) if self.held[-1].piece is None else (closing, closed)
        start = [] if self.cache.next_position or common else self._beginning()
        new = [(item, self.token_ids(item)) for item in items[common:]]
        if start and new:
            new[0] = (new[0][0], [*start, *new[0][1]])
        return Reading(common, closing, closed, new, changed)

    def read(self, reading: Reading, progress: Progress | None = None) -> int:
        """Go back to what stays, and read the rest; return how many tokens that were. All or nothing.

        Raises BehindSpanError where the cache cannot go back that far.
        """
        self.go_back(reading.common)
        ids = [*reading.closing, *(token for _, each in reading.new for token in each)]
        if ids:
            self.engine.prefill(ids, self.cache, progress=progress)
        if reading.closed is not None:
            last = self.held[-1]
            self.held[-1] = replace(last, piece=reading.closed.piece, stop=last.stop + len(reading.closing), unread=())
        position = self.held[-1].stop if self.held else 0
        for item, each in reading.new:
            self.held.append(HeldMessage(item.message.key, item.piece, position, position + len(each)))
            position += len(each)
        return len(ids)

    def settle(self, items: Sequence[Item], progress: Progress | None = None) -> Reading:
        """Drop what a conversation has no more and close its last reply, but read nothing new; return what is left."""
        reading = self.reading(items)
        self.read(replace(reading, new=[]), progress)
        return replace(reading, closing=[], closed=None)

    def go_back(self, count: int) -> None:
        """Forget all but the first `count` messages. Raises BehindSpanError where they are compacted with the rest."""
        if count >= len(self.held):
            return
        start = self.held[count].start
        if start < self.compacted_until:
            raise BehindSpanError(f"message {count + 1} is compacted with others")
        try:
            if start < self.cache.next_position:
                self.cache.truncate(start)
        except CacheError as error:
            raise BehindSpanError(str(error)) from error
        del self.held[count:]

    def hold_reply(self, message: Message, begun: int, reply: ReplyTokens) -> None:
        """Take note of a reply that was just decoded behind `begun` positions, the template's beginning included."""
        inside = self.cache.next_position - begun - len(self.template_ids(reply.begun))
        unread = reply.token_ids[max(0, inside) :]
        self.held.append(HeldMessage(message.key, None, begun, self.cache.next_position, unread))

    def template_ids(self, text: str) -> list[int]:
        """Return the token ids of a template's text."""
        return self.engine.encode(text, control_tokens=True) if text else []

    def token_ids(self, item: Item) -> list[int]:
        """Return the tokens of a message's piece; those of a generated reply as they were generated."""
        rest = None if item.reply is None else after_reply(item)
        if item.reply is None or rest is None:
            return self._encode(item.piece)
        return [
            *self.template_ids(item.reply.begun),
            *item.reply.token_ids,
            *self._encode(rest),
        ]

    def _encode(self, piece: str) -> list[int]:
        """Encode a piece; control tokens are those of the template, never those that somebody spelt in a message."""
        ids: list[int] = []
        for text, spelt in self._controls.parts(piece):
            ids += self.engine.encode(text) if spelt else self.template_ids(text)
        return ids

    def _beginning(self) -> list[int]:
        return [] if self.engine.has_chat_template else self.engine.beginning()


def after_reply(item: Item) -> str | None:
    """Return what the template writes behind a generated reply; None where it writes the reply itself otherwise."""
    message = item.message
    begun = "" if item.reply is None else item.reply.begun
    if item.piece.startswith(begun):
        body = item.piece[len(begun) :].lstrip()
        content = message.content.strip()
        if body.startswith(content) and not message.tool_calls:
            return body[len(content) :] if content else item.ending or body
    return item.ending if message.tool_calls else None
