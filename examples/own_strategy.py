"""A strategy of one's own: keep every n-th entry. Registered by a decorator; packages use an entry point instead.

python examples/own_strategy.py [MODEL]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field

from agentcompact import (
    CompactionRequest,
    Report,
    Span,
    Strategy,
    StrategySettings,
    answer,
    compact,
    load_model,
    register_strategy,
)


class EveryNthSettings(StrategySettings):
    sinks: int = Field(4, ge=0, description="first entries that are always kept")


@register_strategy
class EveryNth(Strategy):
    """Keeps the first entries and then evenly spaced ones: a baseline that needs no queries."""

    name = "every_nth"
    summary = "the first few entries and evenly spaced ones after them"
    settings_type = EveryNthSettings

    def compact_spans(self, request: CompactionRequest, spans: Sequence[Span], phases, report: Report) -> list[Span]:
        new = []
        for span in spans:
            heads = []
            for parts in span:
                sinks = min(self.settings.sinks, request.budget)
                spread = torch.linspace(sinks, len(parts[0]) - 1, request.budget - sinks).round().long()
                rows = torch.cat([torch.arange(sinks), spread]).to(span.keys.device)
                heads.append(tuple(part[rows] for part in parts))
            new.append(Span.from_heads(heads))
        return new


model = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
document = (Path(__file__).parent / "harbour_audit.txt").read_text(encoding="utf-8")
cache = compact(model, document, strategy="every_nth", ratio=4, sinks=8)
print(cache.metadata.reports[-1].strategy, cache.metadata.reports[-1].settings, cache)
print(answer(model, cache, "What is the name of the river?", max_new_tokens=16)[0].text.strip())
