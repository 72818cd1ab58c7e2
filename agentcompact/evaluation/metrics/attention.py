"""What attention reads from a compacted cache, against the full one, with queries that no strategy has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache, Span
from agentcompact.engines import Engine
from agentcompact.fitting.attention_statistics import attention_statistics
from agentcompact.fitting.selection import random_rows, top_entries
from agentcompact.strategies.base import head_groups

HELD_OUT_POSITIONS = 256
"""Positions whose queries are compared, at most."""
LARGEST_LOG_RATIO = 50.0


@dataclass(frozen=True)
class AttentionErrors:
    """Errors of one compacted cache; see `CellResult` for what each is."""

    output: float
    mass: float
    log_mass: float
    overlap: float | None


class HeldOutAttention:
    """The full cache's attention under the queries of the questions about it, to compare other caches with.

    full: an uncompacted cache. turns: the token ids of questions and answers, each read behind the cache for itself.
    """

    def __init__(self, engine: Engine, full: CompactedCache, turns: Sequence[Sequence[int]], seed: int) -> None:
        captured = engine.capture(turns, seed, after=full)
        self._length = full.next_position
        self._scaling = engine.geometry.scaling
        generator = torch.Generator().manual_seed(seed % 2**63)
        rows = random_rows(len(captured.positions), HELD_OUT_POSITIONS, generator)
        self._layers: list[tuple[Span, Tensor, tuple[Tensor, Tensor]]] = []
        self._ranking: list[Tensor] | None = None if full.captured is None else []
        for index, _ in full.full_layers:
            span, queries = full.source(index, 0, self._length), captured.layer(index)
            queries = queries[:, rows.to(queries.device)]
            self._layers.append((span, queries, self._read(span, queries)))
            if self._ranking is not None and full.captured is not None:
                (group,) = head_groups(span, full.captured.layer(index, 0, self._length))
                statistics = attention_statistics(group.queries, group.keys, group.bias, self._scaling, with_mass=False)
                self._ranking.append(statistics.score)

    def compare(self, cache: CompactedCache) -> AttentionErrors | None:
        """Return the errors of a cache of the same tokens; None for one that stands for other text."""
        if cache.next_position != self._length:
            return None
        output, mass, log_mass = [], [], []
        spans = [cache.source(index, 0, self._length) for index, _ in cache.full_layers]
        for (_, queries, (wanted, wanted_mass)), span in zip(self._layers, spans, strict=True):
            made, made_mass = self._read(span, queries)
            output.append(float((made - wanted).norm() / wanted.norm()))
            log_ratio = made_mass - wanted_mass
            log_mass.append(float(log_ratio.abs().mean()))
            mass.append(float(log_ratio.clamp(max=LARGEST_LOG_RATIO).expm1().abs().mean()))
        return AttentionErrors(fmean(output), fmean(mass), fmean(log_mass), self._overlap(spans))

    def _read(self, span: Span, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs (kv_heads, m, head_dim) and log-normalizers (kv_heads, m) of all heads in order."""
        parts = [
            attention_statistics(group.queries, group.keys, group.bias, self._scaling, group.values, with_mass=False)
            for group in head_groups(span, queries)
        ]
        outputs = [part.output for part in parts if part.output is not None]
        return torch.cat(outputs).double(), torch.cat([part.log_normalizer for part in parts]).double()

    def _overlap(self, spans: Sequence[Span]) -> float | None:
        """The share of the kept entries that selection by all the prefill's queries (RMS) keeps too, head by head."""
        if self._ranking is None:
            return None
        shared = kept = 0
        for (full, _, _), ranking, span in zip(self._layers, self._ranking, spans, strict=True):
            for head, (keys, _, _, positions) in enumerate(span):
                places = positions.long()
                if bool((places >= self._length).any()) or not torch.equal(full.dense(full.keys)[head][places], keys):
                    return None  # keys that were made, not selected
                best = top_entries(ranking[head : head + 1], len(places))[0]
                shared += int(torch.isin(places, best).sum())
                kept += len(places)
        return shared / kept if kept else None
