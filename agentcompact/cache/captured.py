"""The queries of a prefill, kept beside the cache within a bound: a seeded sample of positions, alike in all layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentcompact.errors import CacheError

USEFUL_SAMPLE = 256
"""Positions that a sample of a span's queries should have; with fewer they are captured again, for that span alone."""


class CapturedQueries:
    """Post-RoPE queries of up to `capacity` positions, the same positions in every layer.

    Which positions are kept depends on the seed and the position alone (the lowest pseudo-random priorities win),
    so chunked and whole prefills keep the same ones.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.seed = seed
        self.positions = torch.empty(0, dtype=torch.long)
        self._priorities = np.empty(0, dtype=np.uint64)
        self._layers: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._plan: tuple[Tensor, Tensor] | None = None
        self.shared = False
        self.seen: list[tuple[int, int]] = []
        """Ranges of positions that were offered, whether kept or not."""
        self.first = 0
        """Positions before this one are not captured."""

    @classmethod
    def within_bytes(cls, limit: int, bytes_per_position: int, seed: int = 0) -> CapturedQueries:
        """Make a store whose queries take at most `limit` bytes."""
        return cls(limit // max(1, bytes_per_position), seed)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._layers.values(), *self._norms.values()))

    def clone(self) -> CapturedQueries:
        other = CapturedQueries(self.capacity, self.seed)
        other.positions, other._priorities = self.positions.clone(), self._priorities.copy()
        other._layers = {index: t.clone() for index, t in self._layers.items()}
        other._norms = {index: t.clone() for index, t in self._norms.items()}
        other.seen, other.first = list(self.seen), self.first
        return other

    def must_evict(self, count: int) -> bool:
        """Whether so many more positions could push out some that are kept."""
        return len(self.positions) + count > self.capacity

    def snapshot(self) -> tuple[Tensor, np.ndarray, dict[int, Tensor], list[tuple[int, int]]]:
        """Return what `restore` needs to forget all that comes after, as long as nothing is evicted meanwhile."""
        return self.positions, self._priorities, dict(self._layers), list(self.seen)

    def restore(self, known: tuple[Tensor, np.ndarray, dict[int, Tensor], list[tuple[int, int]]]) -> None:
        """Go back to a snapshot."""
        self.positions, self._priorities, self._layers, self.seen = known
        self._plan = None

    def plan(self, start: int, count: int, expected: int) -> None:
        """Decide which of the positions start .. start + count are kept, and in which slots of the store.

        `expected` is how many positions the whole prefill will bring, so that the store is allocated once.
        """
        skipped = min(count, max(0, self.first - start))
        if count > skipped:
            self.seen.append((start + skipped, start + count))
        incoming = np.arange(start + skipped, start + count, dtype=np.uint64)
        priorities = np.concatenate([self._priorities, _mixed(incoming, self.seed)])
        held = len(self._priorities)
        if len(priorities) > self.capacity:
            kept = np.zeros(len(priorities), dtype=bool)
            kept[np.argpartition(priorities, self.capacity)[: self.capacity] if self.capacity else []] = True
        else:
            kept = np.ones(len(priorities), dtype=bool)
        rows = np.flatnonzero(kept[held:])
        free = np.flatnonzero(~kept[:held])
        slots = np.concatenate([free, np.arange(held, held + len(rows) - len(free))]).astype(np.int64)
        size = held + len(rows) - len(free)
        positions = np.concatenate([self.positions.numpy(), np.zeros(size - held, dtype=np.int64)])
        grown = np.concatenate([self._priorities, np.zeros(size - held, dtype=np.uint64)])
        positions[slots] = start + skipped + rows
        grown[slots] = priorities[held:][rows]
        self.positions, self._priorities = torch.from_numpy(positions), grown
        self._plan = (torch.from_numpy(slots), torch.from_numpy(rows + skipped))
        self._expected = min(self.capacity, max(size, held + expected))

    def take(self, layer: int, query: Tensor) -> None:
        """Store the planned rows of one layer's query (1, query_heads, q, head_dim)."""
        if self._plan is None:
            return
        slots, rows = self._plan
        if not len(slots):
            return
        store = self._layers.get(layer)
        if store is None or store.shape[1] < len(self.positions):
            grown = query.new_empty(query.shape[1], self._expected, query.shape[3])
            if store is not None:
                grown[:, : store.shape[1]] = store
            store = self._layers[layer] = grown
        device = query.device
        store[:, slots.to(device)] = query[0][:, rows.to(device)].detach()

    def take_norms(self, layer: int, norms: Tensor) -> None:
        """Store the planned rows of the norms (q,) of what enters one layer's attention block."""
        if self._plan is None:
            return
        slots, rows = (t.to(norms.device) for t in self._plan)
        store = self._norms.get(layer)
        if store is None or len(store) < len(self.positions):
            grown = norms.new_empty(self._expected)
            if store is not None:
                grown[: len(store)] = store
            store = self._norms[layer] = grown
        store[slots] = norms.detach()[rows]

    def before(self, stop: int) -> CapturedQueries:
        """Return the store without the positions from `stop` on: itself where it has none."""
        kept = self.positions < stop
        if bool(kept.all()):
            return self
        other = CapturedQueries(self.capacity, self.seed)
        other.positions, other._priorities = self.positions[kept], self._priorities[kept.numpy()]
        other.seen, other.first = [(a, min(b, stop)) for a, b in self.seen if a < stop], self.first
        other._layers = {
            index: store[:, : len(kept)][:, kept.to(store.device)] for index, store in self._layers.items()
        }
        other._norms = {index: store[: len(kept)][kept.to(store.device)] for index, store in self._norms.items()}
        return other

    def layer(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the queries of one layer at positions in [start, stop): (query_heads, n, head_dim)."""
        store = self._layers[index][:, : len(self.positions)]
        inside = self._inside(start, stop)
        return store if inside is None else store[:, inside.to(store.device)]

    def positions_within(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the positions in [start, stop), (n,), in the order of the queries that `layer` returns."""
        inside = self._inside(start, stop)
        return self.positions if inside is None else self.positions[inside]

    def input_norms(self, index: int) -> Tensor:
        """Return the norm of what entered one layer's attention block with each query: (n,) float32.

        Raises CacheError where none were recorded.
        """
        if index not in self._norms:
            raise CacheError(f"no norms of hidden states were recorded for layer {index}")
        return self._norms[index][: len(self.positions)]

    def _inside(self, start: int, stop: int | None) -> Tensor | None:
        """Return which positions lie in [start, stop), or None for all of them."""
        if start == 0 and (stop is None or not len(self.positions) or int(self.positions.max()) < stop):
            return None
        inside = self.positions >= start
        return inside if stop is None else inside & (self.positions < stop)

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of [start, stop) was offered, and a sample that is worth using was kept of it."""
        reached = start
        for begin, end in sorted(self.seen):
            if begin <= reached:
                reached = max(reached, end)
        inside = int(((self.positions >= start) & (self.positions < stop)).sum())
        return reached >= stop and inside >= min(stop - start, USEFUL_SAMPLE)


def _mixed(positions: np.ndarray, seed: int) -> np.ndarray:
    """splitmix64 of each position, started from the seed."""
    with np.errstate(over="ignore"):
        x = positions + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
