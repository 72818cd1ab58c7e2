"""high_attn_direct: the keys with the highest attention, biases by NNLS, original values."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.attention_matching_settings import PresetSettings


class HighAttentionDirectSettings(PresetSettings):
    values: Literal["least_squares", "direct"] = Field("direct", description="fitted or original values")


class HighAttentionDirect(AttentionMatching):
    """RMS selection, NNLS biases, direct values. Source: the write-up "Compaction", its ablation of values."""

    name = "high_attn_direct"
    summary = "keys of the highest attention over all queries, biases fitted, original values"
    settings_type = HighAttentionDirectSettings
