"""kvzip_plus: KVzip by what an entry adds to the residual stream, relative to what the query's token has there."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.cache import CapturedQueries
from agentcompact.engines.base import CAPTURES_INPUT_NORMS, CAPTURES_QUERIES, GIVES_OUTPUT_NORMS
from agentcompact.fitting.attention_statistics import weighted_maximum
from agentcompact.strategies.base import CompactionRequest, HeadGroup
from agentcompact.strategies.kvzip import KVzip


class KVzipPlus(KVzip):
    """Scores an entry by the maximum over queries and query heads of a * |W_O v| / |x|.

    a: the softmax weight over the span's entries; W_O v: the entry's value through the query head's slice of the output
    projection; x: what entered the attention block, behind its input norm, with that query. Source: KVzip (Kim et al.
    2025), with the normalisation published as KVzip+.
    """

    name = "kvzip_plus"
    summary = "as kvzip, weighted by what an entry's value adds to the output"
    needs = frozenset({CAPTURES_QUERIES, CAPTURES_INPUT_NORMS, GIVES_OUTPUT_NORMS})

    def find_queries(self, request: CompactionRequest) -> CapturedQueries:
        with request.engine.recording_input_norms():
            return super().find_queries(request)

    def score_group(
        self, request: CompactionRequest, layer: int, group: HeadGroup, captured: CapturedQueries
    ) -> Tensor:
        geometry = request.engine.geometry
        heads, pooled, _ = group.queries.shape
        each = group.queries.view(heads, geometry.group, pooled // geometry.group, -1)
        inputs = captured.input_norms(layer)
        factors = inputs.clamp(min=torch.finfo(inputs.dtype).tiny).reciprocal()
        outputs = request.engine.output_norms(layer, group.values, group.heads)
        outputs = outputs.view(heads, geometry.group, -1)
        weights = [
            weighted_maximum(each[:, g], group.keys, group.bias, geometry.scaling, factors)
            for g in range(geometry.group)
        ]
        return (torch.stack(weights, dim=1) * outputs).amax(dim=1)
