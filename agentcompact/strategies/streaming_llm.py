"""StreamingLLM: the first entries (attention sinks) and the most recent ones."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.cache import CapturedQueries, Span
from agentcompact.strategies.base import CompactionRequest
from agentcompact.strategies.eviction import Eviction


class StreamingLLM(Eviction):
    """Keeps the first min(sinks, budget) entries of each head and fills the budget with the last ones.

    Source: Efficient Streaming Language Models with Attention Sinks (Xiao et al. 2024), at fixed positions.
    """

    name = "streaming_llm"
    summary = "the first few entries and the most recent ones; needs no queries, forgets the middle"

    def score_layer(
        self, request: CompactionRequest, layer: int, span: Span, captured: CapturedQueries | None
    ) -> list[Tensor]:
        # Counted from the end, so that one ranking over heads of different lengths compares like with like.
        return [1 / torch.arange(n, 0, -1, device=span.keys.device, dtype=torch.float32) for n in span.lengths]
