"""h2o: heavy hitters, the entries that got the most attention in the prefill, and the latest ones."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from agentcompact.cache import CapturedQueries
from agentcompact.fitting.attention_statistics import causal_mean
from agentcompact.strategies.base import CompactionRequest, HeadGroup
from agentcompact.strategies.eviction import EvictionSettings, QueryEviction, keep_latest


class H2OSettings(EvictionSettings):
    recent: float = Field(0.5, ge=0, le=1, description="share of the budget that the latest entries get")


class H2O(QueryEviction):
    """Scores an entry by its mean causal attention over the prefill's queries that could see it.

    The mean is over the queries of all query heads that share the entry. Source: H2O (Zhang et al. 2023), with a mean
    for the sum, which favours the oldest entries.
    """

    name = "h2o"
    summary = "the entries with the most attention in the prefill, and the latest ones for half of the budget"
    settings_type = H2OSettings
    settings: H2OSettings

    def score_group(
        self, request: CompactionRequest, layer: int, group: HeadGroup, captured: CapturedQueries
    ) -> Tensor:
        positions = self.query_positions(request, captured)
        scaling = request.engine.geometry.scaling
        scores = causal_mean(group.queries, group.keys, group.bias, scaling, positions, group.positions)
        return keep_latest(scores, int(self.settings.recent * request.budget))
