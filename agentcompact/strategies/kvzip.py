"""kvzip: the entries that are needed to repeat the context word for word."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from agentcompact.cache import CapturedQueries
from agentcompact.fitting.attention_statistics import attention_statistics
from agentcompact.fitting.budgets import BudgetKind
from agentcompact.queries import repeat_prefill_queries
from agentcompact.strategies.base import CompactionRequest, HeadGroup
from agentcompact.strategies.eviction import EvictionSettings, QueryEviction


class KVzipSettings(EvictionSettings):
    budgets: BudgetKind = Field(
        "global", description="entries of each head: by one ranking over all layers and heads, or another kind"
    )


class KVzip(QueryEviction):
    """Scores an entry by its highest softmax weight over the queries of repeating the context and the group's heads.

    The softmax is over the entries of the span. Source: KVzip (Kim et al. 2025).
    """

    name = "kvzip"
    summary = "the entries most attended to while the context is repeated; costs about a second prefill"
    settings_type = KVzipSettings

    @property
    def reads_prefill_queries(self) -> bool:
        return False

    def range_of_queries(self, request: CompactionRequest) -> tuple[int, int | None]:
        return 0, None

    def find_queries(self, request: CompactionRequest) -> CapturedQueries:
        return repeat_prefill_queries(
            request.engine, request.cache, request.start, request.end, request.seed, request.progress
        )

    def score_group(
        self, request: CompactionRequest, layer: int, group: HeadGroup, captured: CapturedQueries
    ) -> Tensor:
        scaling = request.engine.geometry.scaling
        found = attention_statistics(group.queries, group.keys, group.bias, scaling, score="max", with_mass=False)
        return found.score
