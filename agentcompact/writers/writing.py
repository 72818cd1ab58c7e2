"""A writer applied to spans: chunks of any length, keys rotated back before it and to cache positions after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.cache import Span
from agentcompact.writers.fast_diamond import FastDiamond

Rotate = Callable[..., Tensor]
"""`Engine.rotate`."""


@dataclass(frozen=True)
class Chunk:
    """Entries [start, stop) of a head become `count` new ones."""

    start: int
    stop: int
    count: int


def plan_chunks(entries: int, budget: int, context: int, latents: int) -> list[Chunk]:
    """Divide a head's entries so that no chunk needs more than the latents, nor is longer than the context.

    Only where the budget is below one entry a chunk are chunks longer than that. Budget and entries are shared in
    proportion, so no chunk writes more entries than it reads.
    """
    parts = min(max(math.ceil(entries / context), math.ceil(budget / latents)), budget)
    counts = [budget * part // parts for part in range(parts + 1)]
    borders = [entries * count // budget for count in counts]
    return [Chunk(borders[part], borders[part + 1], counts[part + 1] - counts[part]) for part in range(parts)]


def write_span(writer: FastDiamond, layer: int, span: Span, budget: int, rotate: Rotate) -> Span:
    """Write `budget` entries for each head of a span; heads that hold no more keep theirs.

    layer: number among the layers of full attention. rotate: the engine's.
    """
    if span.is_uniform and span.entries and span.lengths[0] > budget:
        return _write(writer, layer, slice(None), span, budget, rotate)
    heads = []
    for number, entries in enumerate(span):
        if len(entries[0]) > budget:
            alone = Span.from_heads([entries])
            entries = _write(writer, layer, slice(number, number + 1), alone, budget, rotate).head(0)
        heads.append(entries)
    return Span.from_heads(heads)


def _write(writer: FastDiamond, layer: int, heads: slice, span: Span, budget: int, rotate: Rotate) -> Span:
    """Write the entries of a uniform span, which holds some of the layer's heads, chunk by chunk."""
    keys, values, bias, positions = (span.dense(t) for t in (span.keys, span.values, span.bias, span.positions))
    dtype, own = keys.dtype, writer.latents.dtype
    # Where heads stand alike, their angles are computed once.
    shared = positions[0] if bool((positions == positions[:1]).all()) else positions
    plain, values = rotate(keys, shared, back=True).to(own), values.to(own)
    parts: list[tuple[Tensor, ...]] = []
    for chunk in plan_chunks(keys.shape[1], budget, writer.settings.context, writer.settings.latents):
        rows = slice(chunk.start, chunk.stop)
        new_keys, new_values = writer(layer, plain[:, rows], values[:, rows], bias[:, rows], chunk.count, heads)
        at = _places(writer, positions[:, rows], chunk.count)
        new_bias = writer.biases(layer, bias[:, rows], chunk.count, heads)
        parts.append((rotate(new_keys, at).to(dtype), new_values.to(dtype), new_bias, at))
    if len(parts) > 1:
        parts = [tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))]
    keys, values, bias, positions = parts[0]
    return Span.from_dense(keys, values, positions, bias)


def _places(writer: FastDiamond, positions: Tensor, count: int) -> Tensor:
    """Return the positions (heads, count) of entries that are written from those at positions (heads, n)."""
    if writer.settings.positions == "packed":
        return positions[:, :count]
    return positions[:, torch.arange(count, device=positions.device) * positions.shape[1] // count]
