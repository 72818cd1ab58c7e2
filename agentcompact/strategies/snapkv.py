"""snapkv: the entries that the last queries of the prefill attend to, smoothed over their neighbours."""

from __future__ import annotations

import torch
from pydantic import Field, field_validator
from torch import Tensor

from agentcompact.cache import CapturedQueries
from agentcompact.fitting.attention_statistics import causal_mean
from agentcompact.queries import context_prefill_queries
from agentcompact.strategies.base import CompactionRequest, HeadGroup
from agentcompact.strategies.eviction import EvictionSettings, QueryEviction, keep_latest


class SnapKVSettings(EvictionSettings):
    window: int = Field(32, ge=1, description="last positions whose queries score the entries before them")
    pooling: int = Field(5, ge=1, description="neighbouring entries over which scores are averaged; odd")

    @field_validator("pooling")
    @classmethod
    def _is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd, to have an entry in its middle")
        return value


class SnapKV(QueryEviction):
    """Scores entries before the window by the mean attention of the window's queries; keeps the window itself.

    The scores are averaged over the group's query heads and over `pooling` neighbours (fewer at the ends). Source:
    SnapKV (Li et al. 2024), its scores shared over a group as for GQA.
    """

    name = "snapkv"
    summary = "the entries that the last 32 queries attend to, and those queries' own entries"
    settings_type = SnapKVSettings
    settings: SnapKVSettings

    def range_of_queries(self, request: CompactionRequest) -> tuple[int, int | None]:
        return max(request.start, request.end - self.settings.window), request.end

    def find_queries(self, request: CompactionRequest) -> CapturedQueries:
        start = self.range_of_queries(request)[0]
        return context_prefill_queries(
            request.engine, request.cache, start, request.end, request.seed, request.progress
        )

    def score_group(
        self, request: CompactionRequest, layer: int, group: HeadGroup, captured: CapturedQueries
    ) -> Tensor:
        positions = self.query_positions(request, captured)
        scaling = request.engine.geometry.scaling
        scores = causal_mean(group.queries, group.keys, group.bias, scaling, positions, group.positions)
        in_window = (group.positions >= self.range_of_queries(request)[0]).sum(dim=1)
        pooled = [self._pool(row, len(row) - int(count)) for row, count in zip(scores, in_window, strict=True)]
        return keep_latest(torch.stack(pooled), in_window)

    def _pool(self, scores: Tensor, earlier: int) -> Tensor:
        """Average the first `earlier` scores (n,) over their neighbours among them; the others stay."""
        if earlier == 0:
            return scores
        width = self.settings.pooling
        pooled = torch.nn.functional.avg_pool1d(
            scores[None, None, :earlier], width, stride=1, padding=width // 2, count_include_pad=False
        )
        return torch.cat([pooled[0, 0], scores[earlier:]])
