"""A reply's text as its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into pieces of text that are final.

    What is not complete yet is held back: characters of several tokens, and what may begin a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self.text = ""
        """Everything given out so far, without blanks before the first word."""

    def add(self, token: int) -> str:
        """Take a token; return the text that is now certain, often one word."""
        self._ids.append(token)
        decoded = self._decode(self._ids)
        if decoded.endswith("\ufffd"):
            return ""
        return self._out(decoded[: len(decoded) - self._unsure(decoded)].strip())

    def finish(self, text: str) -> str:
        """Return what is missing of the final text."""
        return self._out(text.strip())

    def _unsure(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        lengths = [n for stop in self._stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])]
        return max(lengths, default=0)

    def _out(self, certain: str) -> str:
        if not certain.startswith(self.text):
            return ""
        piece, self.text = certain[len(self.text) :], certain
        return piece
