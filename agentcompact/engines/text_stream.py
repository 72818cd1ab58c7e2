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
        self._written = ""
        self.text = ""
        """Everything given out so far, without blanks before the first word."""

    def add(self, token: int) -> str:
        """Take a token; return the text that is now certain, often one word."""
        self._ids.append(token)
        decoded = self._decode(self._ids)
        if decoded.endswith("\ufffd"):
            return ""
        certain = decoded[: len(decoded) - self._unsure(decoded)].rstrip()
        return self._out(certain)

    def finish(self, text: str) -> str:
        """Return what is missing of the final text."""
        whole = text.strip()
        piece = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text = whole
        return piece

    def _unsure(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        lengths = [n for stop in self._stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])]
        return max(lengths, default=0)

    def _out(self, certain: str) -> str:
        if not certain.startswith(self._written):
            return ""
        piece = certain[len(self._written) :]
        self._written = certain
        if not self.text:
            piece = piece.lstrip()
        self.text += piece
        return piece
