"""A turn in a thread of its own, so that the model's lock never waits for whoever reads the stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from agentcompact.session.compaction import CompactionReport
from agentcompact.session.replying import OnText
from langchain_agentcompact.turns import Answer, OnCompaction

RunTurn = Callable[[OnText, OnCompaction], Answer]
Event = str | CompactionReport | Answer


class _AbandonedError(Exception):
    """Nobody reads the stream any more."""


class TurnStream:
    """Runs a turn and gives what happens as it happens: pieces of text, reports of compactions, and last the answer."""

    def __init__(self, run: RunTurn) -> None:
        self._run = run
        self._events: queue.SimpleQueue[str | CompactionReport | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()

    def events(self) -> Iterator[Event]:
        """Give all events. Raises what the turn raises; the turn ends where this is closed before its end."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="agentcompact-stream")
        answer = executor.submit(self._work)
        executor.shutdown(wait=False)
        try:
            while (event := self._events.get()) is not None:
                yield event
            yield answer.result()
        finally:
            self._abandoned.set()

    def _work(self) -> Answer:
        try:
            return self._run(self._text, self._events.put)
        finally:
            self._events.put(None)

    def _text(self, piece: str) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError
        if piece:
            self._events.put(piece)
