"""The live tail of one layer: a buffer that grows by parts and is shared between forks until one of them writes."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class TailBuffer:
    """Keys and values (batch, kv_heads, capacity, head_dim), of which the first `used` positions are written.

    Forks hold the same buffer with a length of their own. Appending is done in place, but where the buffer is
    `shared` only behind `used`: a fork whose length lies before that copies first, since what follows its end
    belongs to another.
    """

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        self.keys = keys
        self.values = values
        self.used = used
        self.shared = False
        self._lock = threading.Lock()

    @classmethod
    def empty(cls, like_keys: Tensor, like_values: Tensor, capacity: int) -> TailBuffer:
        batch, heads = like_keys.shape[:2]
        return cls(
            like_keys.new_empty(batch, heads, capacity, like_keys.shape[-1]),
            like_values.new_empty(batch, heads, capacity, like_values.shape[-1]),
            0,
        )

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def append(self, length: int, keys: Tensor, values: Tensor, reserve: int) -> TailBuffer:
        """Write keys and values (batch, kv_heads, n, head_dim) behind `length`; return the buffer that holds them.

        `reserve` is the capacity that a new buffer should have at least.
        """
        end = length + keys.shape[2]
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            return TailBuffer(
                torch.cat([self.keys[:, :, :length], keys], dim=2),
                torch.cat([self.values[:, :, :length], values], dim=2),
                end,
            )
        target = self
        with self._lock:  # two threads may append to forks of one cache: one gets the place behind, the other copies
            taken = (self.shared and self.used != length) or end > self.capacity or self.batch != keys.shape[0]
            if not taken:
                self.used = end
        if taken:
            grown = end if length == 0 else end + end // 4 + 64
            target = TailBuffer.empty(keys, values, max(grown if reserve <= end else end, reserve))
            target.keys[:, :, :length] = self.keys[:, :, :length]
            target.values[:, :, :length] = self.values[:, :, :length]
        target.keys[:, :, length:end] = keys
        target.values[:, :, length:end] = values
        target.used = end
        return target

    def select(self, length: int, rows: Tensor) -> TailBuffer:
        """Return a buffer with these rows of the batch."""
        rows = rows.to(self.keys.device)
        return TailBuffer(self.keys[:, :, :length][rows], self.values[:, :, :length][rows], length)

    def last(self, length: int, count: int) -> TailBuffer:
        """Return a buffer of its own with the last `count` of `length` positions."""
        start = length - count
        return TailBuffer(self.keys[:, :, start:length].clone(), self.values[:, :, start:length].clone(), count)
