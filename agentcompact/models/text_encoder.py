"""Text to token ids, from a tokenizer of its own that nobody else sets."""

from __future__ import annotations

import copy
import threading
from typing import Any


class TextEncoder:
    """Encodes text with a private copy of a tokenizer, one thread at a time.

    How control tokens are read is state of a transformers tokenizer, changed by every call: a shared one could turn
    the control tokens written in one thread's document into real ones because of another thread's template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        first = self._tokenizer("a", verbose=False)["input_ids"][:1]
        self.beginning = [int(i) for i in first if i == tokenizer.bos_token_id]
        """What the tokenizer puts before a plain text: the beginning of sequence, or nothing."""
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.control_strings = frozenset(
            str(token.content) for token in added.values() if token.special and token.content.strip()
        ) | frozenset(tokenizer.all_special_tokens)
        """Texts that are control tokens where they are read as such."""

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Token ids of a text, nothing added; control tokens in it are plain text unless `control_tokens`."""
        with self._lock:
            encoded = self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=not control_tokens, verbose=False
            )
        return [int(i) for i in encoded["input_ids"]]
