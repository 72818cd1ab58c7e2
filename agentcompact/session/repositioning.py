"""Moving what is kept to lower positions, so that a conversation never reaches the end of the model's context."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache, Span
from agentcompact.cache.tail import TailBuffer
from agentcompact.engines import ROTATES_STATES, Engine
from agentcompact.errors import CapabilityError, UnsupportedModelError
from agentcompact.session.context import Context
from agentcompact.session.planning import held_in

NEAR = 0.75
"""Fraction of the model's context beyond which positions are moved down."""


@dataclass(frozen=True)
class Piece:
    """Positions [start, stop) that become `length` positions."""

    start: int
    stop: int
    length: int


def check_repositioning(engine: Engine) -> None:
    """Raise CapabilityError or UnsupportedModelError where keys cannot be moved."""
    if ROTATES_STATES not in engine.capabilities:
        raise CapabilityError("positions cannot be moved: the engine does not rotate states")
    if len(engine.geometry.full_layers) < len(engine.geometry.sliding_windows):
        raise UnsupportedModelError(
            f"{engine.geometry.model_type}: positions cannot be moved in layers with a sliding window"
        )


def shortest_length(cache: CompactedCache, start: int, stop: int) -> int:
    """Return the fewest positions that the entries between start and stop can have without sharing any."""
    longest = 1
    for index, _ in cache.full_layers:
        longest = max(longest, *cache.source(index, start, stop).lengths)
    return min(longest, stop - start)


def repositioned(engine: Engine, cache: CompactedCache, pieces: Sequence[Piece]) -> CompactedCache:
    """Return a cache in which each piece takes the positions it says, and all later ones follow.

    pieces: of the compacted span, at least one, each beginning where the one before it stops. Keys are rotated back
    from where they were and forth to where they are now; values, biases and the order of entries stay. Of the token ids
    the last ones of each piece are kept. Captured queries are dropped: they lie at the old positions.
    """
    check_repositioning(engine)
    start, stop = pieces[0].start, pieces[-1].stop
    total = sum(piece.length for piece in pieces)
    if not cache.span_tokens >= stop > start or not all(1 <= each.length <= each.stop - each.start for each in pieces):
        raise CapabilityError(f"positions {start} to {stop} cannot become {total}: only a compacted span is moved")
    other, gap = cache.fork(), (stop - start) - total

    def moved(positions: Tensor) -> Tensor:
        made, begin = torch.where(positions < stop, positions, positions - gap), start
        for piece in pieces:
            inside = begin + (positions - piece.start) * piece.length // (piece.stop - piece.start)
            made = torch.where((positions >= piece.start) & (positions < piece.stop), inside, made)
            begin += piece.length
        return made

    for _, layer in other.full_layers:
        span, tail, live = layer.span, layer.tail, layer.length
        new = None if span is None else _moved_span(engine, span, moved(span.positions))
        if tail is not None and live:
            places = torch.arange(layer.before, layer.before + live, device=tail.keys.device)
            keys = _moved_keys(engine, tail.keys[0, :, :live], places, places - gap)
            tail = TailBuffer(keys[None], tail.values[:, :, :live].clone(), live)
        layer.hold(new, layer.before - gap, tail, live)
    other.captured = None
    if len(other.token_ids) == cache.next_position:
        for piece in reversed(pieces):
            del other.token_ids[piece.start : piece.stop - piece.length]
    return other


def moved_down(engine: Engine, context: Context, start: int, more: int) -> Context | None:
    """Return a context whose compacted positions from `start` on are moved down, or None where that is not needed.

    more: tokens that are to come. Raises what `check_repositioning` raises where it is needed and cannot be done.
    """
    limit, cache = engine.geometry.max_positions, context.cache
    if cache.next_position + more <= NEAR * limit or not cache.is_compacted:
        return None
    stop = cache.span_tokens
    pieces = _pieces(context, start, stop, limit) if stop > start else []
    if sum(piece.length for piece in pieces) >= stop - start:
        return None

    def place(position: int) -> int:
        moved = min(position, start)
        for piece in pieces:
            inside = min(max(0, position - piece.start), piece.stop - piece.start)
            moved += inside * piece.length // (piece.stop - piece.start)
        return moved + max(0, position - stop)

    held = [replace(each, start=place(each.start), stop=place(each.stop)) for each in context.held]
    return Context(engine, repositioned(engine, cache, pieces), held, place(context.frozen))


def _pieces(context: Context, start: int, stop: int, limit: int) -> list[Piece]:
    """Return how many positions each message of a compacted span takes; messages that are whole, as pinned ones, stay
    as wide as they are, so that their words keep their distances."""
    cache = context.cache
    inside = {min(max(edge, start), stop) for each in context.held for edge in (each.start, each.stop)}
    edges = sorted({start, stop} | inside)
    parts = list(itertools.pairwise(edges))
    whole = {part for part in parts if held_in(cache, *part) >= part[1] - part[0]}
    solid = sum(end - begin for begin, end in whole)
    rest = max(0, new_length(cache, start, stop, limit) - solid)
    scale = rest / max(1, stop - start - solid)
    pieces = []
    for begin, end in parts:
        wanted = max(1, shortest_length(cache, begin, end), math.floor((end - begin) * scale))
        pieces.append(Piece(begin, end, end - begin if (begin, end) in whole else min(end - begin, wanted)))
    return pieces


def new_length(cache: CompactedCache, start: int, stop: int, limit: int) -> int:
    """Return how many positions a compacted span should take: a quarter of the limit, or what its entries need."""
    return max(1, min(stop - start, max(shortest_length(cache, start, stop), math.ceil(limit / 4))))


def _moved_span(engine: Engine, span: Span, positions: Tensor) -> Span:
    """Return the span with its entries at other positions."""
    keys = _moved_keys(engine, span.keys[None], span.positions, positions)[0]
    return Span(keys, span.values, span.bias, positions, span.offsets)


def _moved_keys(engine: Engine, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Rotate keys (heads, n, head_dim) from old positions to new ones; those that stay are not touched."""
    changed = old != new
    if not bool(changed.any()):
        return keys
    turned = engine.rotate(engine.rotate(keys.float(), old, back=True), new).to(keys.dtype)
    return torch.where(changed[None, :, None], turned, keys)
