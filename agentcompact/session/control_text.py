"""Control tokens that somebody spells: hidden from the template, and read as the text they are.

A message, a tool's result or a call's argument may hold "<|im_end|>". Rendered as it is, it would end the message. So
such texts are replaced by marks before a template sees them, and each mark is encoded as plain text afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from agentcompact.session.messages import Message

_MARK = "controltext7d41e9n{}x"
_MARKS = re.compile(r"controltext7d41e9n(\d+)x")


class ControlText:
    """The control strings of a model, longest first."""

    def __init__(self, strings: Sequence[str] | frozenset[str] = ()) -> None:
        self._strings = sorted(strings, key=lambda text: (-len(text), text))

    def hidden(self, message: Message) -> Message:
        """Return the message with a mark for each control string in any of its texts."""
        data = message.model_dump(mode="json")
        replaced = self._replaced(data)
        return message if replaced == data else Message.model_validate(replaced)

    def parts(self, piece: str) -> Iterator[tuple[str, bool]]:
        """Split a rendered piece into texts, each with whether somebody spelt a control string there."""
        done = 0
        for mark in _MARKS.finditer(piece):
            number = int(mark[1])
            if number >= len(self._strings):
                continue
            if mark.start() > done:
                yield piece[done : mark.start()], False
            yield self._strings[number], True
            done = mark.end()
        if done < len(piece):
            yield piece[done:], False

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            for number, text in enumerate(self._strings):
                value = value.replace(text, _MARK.format(number))
            return value
        if isinstance(value, dict):
            return {
                name if name in Message.model_fields else self._replaced(name): self._replaced(each)
                for name, each in value.items()
            }
        return [self._replaced(each) for each in value] if isinstance(value, list) else value
