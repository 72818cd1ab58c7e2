"""On-policy compaction: each layer is compacted by the queries that it gets once the layers below are compacted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from agentcompact.cache import Span, join_spans
from agentcompact.strategies.base import CompactionRequest, Phases

if TYPE_CHECKING:
    from agentcompact.strategies.attention_matching import AttentionMatching


def compact_on_policy(
    strategy: AttentionMatching,
    request: CompactionRequest,
    spans: Sequence[Span],
    turns: Sequence[Sequence[int]],
    counts: list[list[int]] | None,
    phases: Phases,
) -> list[Span]:
    """Compact layer by layer within one pass over the reference turns.

    counts: entries of each head of each layer; None where they come from a ranking within the layer.
    Source: Fast KV Compaction via Attention Matching (Zweiger et al. 2026), on-policy queries.
    """
    cache, engine = request.cache, request.engine
    places = {index: place for place, (index, _) in enumerate(cache.full_layers)}
    new: list[Span] = list(spans)

    def rewrite(index: int, queries: Tensor) -> Span:
        place = places[index]
        new[place] = strategy.compact_layer(place, spans[place], queries, counts, request, phases)
        before = [cache.source(index, 0, request.start)] if request.start else []
        after = [cache.source(index, request.end, cache.next_position)] if request.end < cache.next_position else []
        return join_spans([*before, new[place], *after])

    with phases.phase("reading on policy"):
        engine.read_rewriting(turns, cache, rewrite)
    return new
