"""expected_attention: the attention that future queries will pay on average, from the statistics of those so far."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from agentcompact.cache import CapturedQueries
from agentcompact.engines import Engine
from agentcompact.engines.base import CAPTURES_QUERIES, ROTATES_STATES
from agentcompact.strategies.base import CompactionRequest, HeadGroup
from agentcompact.strategies.eviction import EvictionSettings, QueryEviction

ROTATED_AT_A_TIME = 64


class ExpectedAttentionSettings(EvictionSettings):
    future: int = Field(512, ge=1, description="next positions over which the queries' rotation is averaged")
    epsilon: float = Field(0.0, ge=0, allow_inf_nan=False, description="added to each weight before the value's norm")
    covariance: bool = Field(True, description="count the spread of the queries, not their mean alone")
    value_norm: bool = Field(True, description="multiply by the norm of the entry's value")


class ExpectedAttention(QueryEviction):
    """Scores an entry by its expected softmax weight under normally distributed future queries.

    The position-free queries have mean mu and covariance Sigma; with R the mean rotation of the next positions, an
    entry's expected unnormalised weight is exp(s (R mu)^T k + s^2 k^T (R Sigma R^T) k / 2 + bias), s the scaling. Its
    share over the entries, plus epsilon, times the norm of its value, is averaged over the group's query heads.
    Source: Expected Attention (Devoto et al. 2025).
    """

    name = "expected_attention"
    summary = "the entries that future queries are expected to attend to, by the mean and spread of those so far"
    settings_type = ExpectedAttentionSettings
    settings: ExpectedAttentionSettings
    needs = frozenset({CAPTURES_QUERIES, ROTATES_STATES})

    def score_group(
        self, request: CompactionRequest, layer: int, group: HeadGroup, captured: CapturedQueries
    ) -> Tensor:
        geometry = request.engine.geometry
        heads, pooled, dim = group.queries.shape
        each = group.queries.float().view(heads * geometry.group, pooled // geometry.group, dim)
        positions = captured.positions_within(*self.range_of_queries(request))
        plain = request.engine.rotate(each, positions, back=True)
        rotation = self._mean_rotation(request.engine, request.cache.next_position, plain)
        mean = plain.mean(dim=1)
        keys = group.keys.float()
        scores = ((mean @ rotation).view(heads, geometry.group, dim) @ keys.transpose(1, 2)) * geometry.scaling
        if self.settings.covariance:
            spread = (plain - mean[:, None]) @ rotation  # (heads * G, m, dim): its products are R Sigma R^T
            sigma = (spread.transpose(1, 2) @ spread / plain.shape[1]).view(heads, geometry.group, dim, dim)
            around = ((keys[:, None] @ sigma) * keys[:, None]).sum(dim=-1)
            scores = scores + around * (geometry.scaling**2 / 2)
        weights = (scores + group.bias[:, None]).softmax(dim=-1) + self.settings.epsilon
        if self.settings.value_norm:
            weights = weights * torch.linalg.vector_norm(group.values.float(), dim=-1)[:, None]
        return weights.mean(dim=1)

    def _mean_rotation(self, engine: Engine, first: int, like: Tensor) -> Tensor:
        """Return the transposed mean rotation (dim, dim) of the positions from `first` on that the model has."""
        limit = engine.geometry.max_positions
        begin = min(first, limit - 1)
        positions = torch.arange(begin, min(begin + self.settings.future, limit))
        dim = like.shape[-1]
        total = like.new_zeros(dim, dim)
        for part in torch.split(positions, ROTATED_AT_A_TIME):
            unit = torch.eye(dim, device=like.device)[:, None].expand(dim, len(part), dim)
            total += engine.rotate(unit, part).sum(dim=1)
        return total / len(positions)
