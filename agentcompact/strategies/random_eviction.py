"""random: entries drawn by a seed, the baseline that every score must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.cache import CapturedQueries, Span
from agentcompact.strategies.base import CompactionRequest
from agentcompact.strategies.eviction import Eviction


class RandomEviction(Eviction):
    """Keeps the sinks and, of the other entries, a random choice of each head, alike for the same seed."""

    name = "random"
    summary = "the first few entries and a random choice of the others; a baseline"

    def score_layer(
        self, request: CompactionRequest, layer: int, span: Span, captured: CapturedQueries | None
    ) -> list[Tensor]:
        scores = []
        for head, n in enumerate(span.lengths):
            generator = torch.Generator().manual_seed(((request.seed * 1_000_003 + layer) * 1_009 + head) % 2**63)
            scores.append(torch.rand(n, generator=generator).to(span.keys.device))
        return scores
