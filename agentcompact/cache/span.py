"""The entries of one layer that stand for a span of tokens: flat, ragged over the KV heads, never padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Entries of one layer, head after head.

    keys, values: (entries, head_dim), keys after RoPE. bias: (entries,) float32, added to the scaled score.
    positions: (entries,) int32, the token position that each key was rotated to. offsets: kv_heads + 1 numbers;
    head h owns rows offsets[h] to offsets[h + 1].
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    positions: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def from_heads(cls, heads: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Span:
        """Join per-head (keys, values, bias, positions) into one flat span."""
        keys, values, bias, positions = (torch.cat(parts) for parts in zip(*heads, strict=True))
        offsets = tuple(accumulate((len(head[0]) for head in heads), initial=0))
        return cls(keys, values, bias.float(), positions.to(torch.int32), offsets)

    @classmethod
    def from_dense(cls, keys: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None = None) -> Span:
        """Make a span with equally many entries in each head, without a copy where the memory allows it.

        keys, values: (kv_heads, n, head_dim). positions: (n,) or (kv_heads, n). bias: (kv_heads, n) or None for 0.
        """
        heads, n, _ = keys.shape
        if bias is None:
            bias = torch.zeros(heads, n, device=keys.device)
        return cls(
            keys.reshape(heads * n, -1),
            values.reshape(heads * n, -1),
            bias.reshape(-1).float(),
            positions.to(torch.int32).expand(heads, n).reshape(-1),
            tuple(range(0, heads * n + 1, n)) if n else (0,) * (heads + 1),
        )

    @property
    def heads(self) -> int:
        return len(self.offsets) - 1

    @property
    def entries(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Entries of each head."""
        return tuple(b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False))

    @property
    def is_uniform(self) -> bool:
        """Whether every head holds equally many entries."""
        return len(set(self.lengths)) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the entries: keys, values, biases and positions."""
        return sum(t.nbytes for t in (self.keys, self.values, self.bias, self.positions))

    def dense(self, rows: Tensor) -> Tensor:
        """View one of this span's tensors as (kv_heads, n, ...); the span must be uniform."""
        return rows.view(self.heads, -1, *rows.shape[1:])

    def head(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views of one head's (keys, values, bias, positions)."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.keys[rows], self.values[rows], self.bias[rows], self.positions[rows]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return (self.head(index) for index in range(self.heads))

    def within(self, start: int, stop: int) -> Span:
        """Return the entries whose positions lie in [start, stop)."""
        inside = (self.positions >= start) & (self.positions < stop)
        if bool(inside.all()):
            return self
        kept = [inside[a:b].sum().item() for a, b in zip(self.offsets, self.offsets[1:], strict=False)]
        offsets = tuple(int(x) for x in accumulate(kept, initial=0))
        return Span(self.keys[inside], self.values[inside], self.bias[inside], self.positions[inside], offsets)

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Span:
        """Return the span on another device, its keys and values in another dtype."""
        return Span(
            self.keys.to(device=device, dtype=dtype),
            self.values.to(device=device, dtype=dtype),
            self.bias.to(device=device),
            self.positions.to(device=device),
            self.offsets,
        )


def join_spans(spans: Sequence[Span]) -> Span:
    """Put the entries of several spans of one layer together, head by head, in the order given."""
    present = [span for span in spans if span.entries]
    if len(present) == 1:
        return present[0]
    heads = spans[0].heads
    parts = [[span.head(h) for span in spans] for h in range(heads)]
    return Span.from_heads([tuple(torch.cat(t) for t in zip(*head, strict=True)) for head in parts])  # type: ignore[misc]
