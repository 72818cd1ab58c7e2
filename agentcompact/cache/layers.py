"""What a cache keeps for one attention layer: a compacted span and a live tail, or a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from agentcompact.cache.span import Span, join_spans
from agentcompact.cache.tail import TailBuffer
from agentcompact.errors import AttentionImplementationError, CacheError

ATTENTION_NAME = "agentcompact"
"""The name under which the attention function that sees compacted spans is registered with transformers."""

Observer = Callable[[Tensor], None]


class _TailLayer(CacheLayerMixin):  # type: ignore[misc]
    """Shared ground of both kinds of layer: a live tail that is appended to, cropped and forked."""

    is_sliding = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.before = 0
        """Logical tokens that the tail does not hold."""
        self.length = 0
        self.tail: TailBuffer | None = None
        self.reserve = 0
        self.observer: Observer | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.tail = TailBuffer.empty(key_states, value_states, max(self.reserve, key_states.shape[2]))
        self.device = key_states.device
        self.is_initialized = True

    def _append(self, keys: Tensor, values: Tensor) -> TailBuffer:
        if self.tail is None:
            self.lazy_initialization(keys, values)
        tail = self.tail
        if tail is None:
            raise CacheError("the live tail could not be made")
        if tail.batch != keys.shape[0]:
            if tail.batch != 1 and self.length:
                raise CacheError(f"a cache of {tail.batch} sequences cannot take {keys.shape[0]}")
            tail = tail.select(self.length, torch.zeros(keys.shape[0], dtype=torch.long))
        self.tail = tail.append(self.length, keys, values, self.reserve)
        self.length += keys.shape[2]
        return self.tail

    @property
    def is_croppable(self) -> bool:
        """What transformers asks before assisted decoding: no, once tokens lie in a compacted span.

        Assisted decoding feeds a prefilled cache its whole prompt again (seen with any cache, release 5.24), which
        would be silently wrong; with this answer it refuses.
        """
        return self.before == 0

    def get_seq_length(self) -> int:
        """Logical tokens so far, which is the position of the next one."""
        return self.before + self.length

    def get_max_length(self) -> int:
        return -1

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise CacheError if `crop` could not be done."""
        if tokens_to_remove > 0:
            raise CacheError("crop takes the number of tokens to drop as a negative number")
        if -tokens_to_remove > self.length:
            raise CacheError(f"only the live tail can be truncated: it holds {self.length} tokens")

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of the live tail, given as a negative number (transformers' convention)."""
        self.check_crop(tokens_to_remove)
        self.length += tokens_to_remove

    def reset(self) -> None:
        """Forget everything."""
        self.tail, self.length, self.before, self.is_initialized = None, 0, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.tail is not None:
            self.tail = self.tail.select(self.length, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.tail is not None:
            self.batch_select_indices(torch.arange(self.tail.batch).repeat_interleave(repeats))

    def offload(self) -> None:
        raise CacheError("a compacted cache cannot be offloaded: it lies on the model's device")

    prefetch = offload

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes if self.tail is not None else 0

    def _copy_to(self, other: _TailLayer) -> None:
        other.before, other.length, other.tail = self.before, self.length, self.tail
        other.is_initialized = self.is_initialized
        if self.tail is not None:
            self.tail.shared = True


class FullLayer(_TailLayer):
    """A layer of full attention: a compacted span (or None) and the live tail behind it."""

    def __init__(self, config: Any, span: Span | None = None, span_tokens: int = 0) -> None:
        super().__init__(config)
        self.span = span
        self.before = span_tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append to the tail and return its keys and values; the keys carry this layer for the attention function."""
        if self.span is not None or self.observer is not None:
            self._require_own_attention()
        tail = self._append(key_states, value_states)
        keys, values = tail.keys[:, :, : self.length], tail.values[:, :, : self.length]
        keys.agentcompact_layer = self  # type: ignore[attr-defined]
        return keys, values

    def _require_own_attention(self) -> None:
        if torch.compiler.is_compiling():
            raise AttentionImplementationError(
                "a compacted cache cannot be used in a compiled model: drop torch.compile"
            )
        name = getattr(self.config, "_attn_implementation", None)
        if name != ATTENTION_NAME:
            raise AttentionImplementationError(
                f"the model's attention implementation is '{name}', which would not see the compacted entries: "
                f"call model.set_attn_implementation('{ATTENTION_NAME}') first"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, self.before

    def reset(self) -> None:
        super().reset()
        self.span = None

    def fork(self) -> FullLayer:
        other = FullLayer(self.config, self.span)
        self._copy_to(other)
        return other

    def tail_span(self, start: int = 0, stop: int | None = None) -> Span | None:
        """Return live entries at positions [start, stop), unbiased, without a copy where they fill the buffer."""
        first = max(0, start - self.before)
        last = self.length if stop is None else min(self.length, stop - self.before)
        if self.tail is None or first >= last:
            return None
        if self.tail.batch != 1:
            raise CacheError(f"a cache of {self.tail.batch} sequences has no single live tail: compact one at a time")
        keys, values = self.tail.keys[0, :, first:last], self.tail.values[0, :, first:last]
        positions = torch.arange(self.before + first, self.before + last, device=keys.device)
        return Span.from_dense(keys, values, positions)

    def all_entries(self) -> Span | None:
        """Return span and live tail as one span."""
        parts = [part for part in (self.span, self.tail_span()) if part is not None]
        return join_spans(parts) if parts else None

    def entries_between(self, start: int, stop: int) -> Span | None:
        """Return the entries, compacted and live, at positions [start, stop) as one span."""
        old = self.span.within(start, stop) if self.span is not None and start < self.before else None
        parts = [part for part in (old, self.tail_span(start, stop)) if part is not None]
        return join_spans(parts) if parts else None

    def hold(self, span: Span | None, tokens: int, tail: TailBuffer | None = None, length: int = 0) -> None:
        """Replace everything by a span that stands for `tokens` tokens, and a live tail behind it."""
        self.span, self.before, self.tail, self.length = span, tokens, tail, length

    @property
    def nbytes(self) -> int:
        return super().nbytes + (self.span.nbytes if self.span is not None else 0)


class SlidingLayer(_TailLayer):
    """A sliding-window layer: it keeps its window and everything since the last `drop_outside_window`.

    What lies before the window of the last drop is gone, so the cache can be truncated no further back than that.
    """

    is_sliding = True

    def __init__(self, config: Any, window: int) -> None:
        super().__init__(config)
        self.window = window
        self._gap_start = 0
        self._gaps: Tensor | None = None

    def set_gaps(self, start: int, gaps: Tensor) -> None:
        """Announce that each row has `gaps` (batch,) slots of padding from slot `start` on.

        transformers measures a window in slots; with padding inside it, only positions tell what is in the window.
        """
        self._gap_start, self._gaps = start, gaps

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        seen = self._visible()
        tail = self._append(key_states, value_states)
        start = self.length - key_states.shape[2] - seen
        keys, values = tail.keys[:, :, start : self.length], tail.values[:, :, start : self.length]
        keys.agentcompact_layer = self  # type: ignore[attr-defined]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self._visible()
        return seen + query_length, self.get_seq_length() - seen

    def _visible(self) -> int:
        """Slots before the next token that some row may see."""
        widest = 0 if self._gaps is None else int(self._gaps.max())
        return min(self.length, self.window - 1 + widest)

    def mask(self, queries: int, keys: int) -> Tensor | None:
        """Return what the last `queries` slots see of the last `keys`, (batch, 1, queries, keys); None without gaps."""
        if self._gaps is None:
            return None
        end, gaps = self.get_seq_length(), self._gaps[:, None]
        slots = torch.arange(end - keys, end, device=gaps.device)[None]
        after = slots >= self._gap_start
        padding = after & (slots < self._gap_start + gaps)
        positions = slots - gaps * after
        row, column = slots[:, -queries:, None], slots[:, None]
        near = positions[:, -queries:, None] - positions[:, None] < self.window
        seen = (column <= row) & near & ~padding[:, None]
        return (seen | (column == row))[:, None]  # padding sees itself: a row without any weight would be NaN

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._gaps is not None:
            self._gaps = self._gaps[indices]

    def get_max_length(self) -> int:
        return self.window

    def check_crop(self, tokens_to_remove: int) -> None:
        super().check_crop(tokens_to_remove)
        left = self.length + tokens_to_remove
        if left < min(self.window - 1, self.get_seq_length() + tokens_to_remove):
            raise CacheError(
                f"sliding-window layers no longer hold what lies {-tokens_to_remove} tokens back: "
                "fork the cache before adding tokens, and go back to the fork"
            )

    def drop_outside_window(self) -> None:
        """Free what no later token can see."""
        keep = min(self.length, self.window - 1)
        if self.tail is not None and keep < self.length:
            self.before += self.length - keep
            self.tail = self.tail.last(self.length, keep)
            self.length = keep

    def reset(self) -> None:
        super().reset()
        self._gaps = None

    def fork(self) -> SlidingLayer:
        other = SlidingLayer(self.config, self.window)
        self._copy_to(other)
        other._gap_start, other._gaps = self._gap_start, self._gaps
        return other
