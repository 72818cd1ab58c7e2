"""StreamingLLM: the first entries (attention sinks) and the most recent ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from agentcompact.cache import Report, Span
from agentcompact.strategies.base import CompactionRequest, Phases, Strategy, StrategySettings


class StreamingLLMSettings(StrategySettings):
    sinks: int = Field(4, ge=0, description="first entries that are always kept, at most the budget")


class StreamingLLM(Strategy):
    """Keeps the first min(sinks, budget) entries of each head and fills the budget with the last ones.

    Source: Efficient Streaming Language Models with Attention Sinks (Xiao et al. 2024), at fixed positions.
    """

    name = "streaming_llm"
    summary = "the first few entries and the most recent ones; needs no queries, forgets the middle"
    settings_type = StreamingLLMSettings
    settings: StreamingLLMSettings

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        with phases.phase("selection"):
            return [self._compact_span(span, request.budget) for span in spans]

    def _compact_span(self, span: Span, budget: int) -> Span:
        sinks = min(self.settings.sinks, budget)
        heads = []
        for parts in span:
            n = len(parts[0])
            first = torch.arange(min(sinks, n))
            last = torch.arange(max(len(first), n - (budget - len(first))), n)
            rows = torch.cat([first, last]).to(span.keys.device)
            heads.append(tuple(part[rows] for part in parts))
        return Span.from_heads(heads)  # type: ignore[arg-type]
