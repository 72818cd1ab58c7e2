"""No compaction: every entry is kept, as a span. The yardstick for all others."""

from __future__ import annotations

from collections.abc import Sequence

from agentcompact.cache import Report, Span
from agentcompact.strategies.base import CompactionRequest, Phases, Strategy


class NoCompaction(Strategy):
    """Keeps all entries as they are, whatever the budget."""

    name = "none"
    summary = "keeps every entry: the full cache, for comparison"

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        return list(spans)

    def _is_enough(self, request: CompactionRequest, spans: Sequence[Span]) -> bool:
        return False
