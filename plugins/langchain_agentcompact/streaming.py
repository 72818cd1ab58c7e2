"""A turn in a thread of its own, so that the model's lock never waits for whoever reads the stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from agentcompact.session.compaction import CompactionReport
from langchain_agentcompact.turns import Answer, OnCompaction, OnText

RunTurn = Callable[[OnText, OnCompaction], Answer]
Event = str | CompactionReport | Answer


class _AbandonedError(Exception):
    """Nobody reads the stream any more."""


class TurnStream:
    """Runs a turn and gives what happens as it happens: pieces of text, reports of compactions, and last the answer."""

    def __init__(self, run: RunTurn) -> None:
        self._run = run
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._abandoned = threading.Event()

    def events(self) -> Iterator[Event]:
        """Give all events. Raises what the turn raises; the turn ends where this is closed before its end."""
        thread = threading.Thread(target=self._work, name="agentcompact-stream", daemon=True)
        thread.start()
        try:
            while True:
                event = self._events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Answer):
                    return
        finally:
            self._abandoned.set()

    def _work(self) -> None:
        try:
            self._events.put(self._run(self._text, self._events.put))
        except _AbandonedError:
            return
        except BaseException as error:  # raised again where the stream is read
            self._events.put(error)

    def _text(self, piece: str) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError
        if piece:
            self._events.put(piece)
