"""high_attn_redist_direct: the keys with the highest attention, mass redistributed, original values."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.attention_matching_settings import PresetSettings


class HighAttentionRedistDirectSettings(PresetSettings):
    bias: Literal["nnls", "redistribute", "none"] = Field(
        "redistribute", description="how the entries get their biases"
    )
    values: Literal["least_squares", "direct"] = Field("direct", description="fitted or original values")


class HighAttentionRedistDirect(AttentionMatching):
    """RMS selection, uniform redistribution, direct values: `two_pass` without its shortlist.

    Source: the write-up "Compaction".
    """

    name = "high_attn_redist_direct"
    summary = "keys of the highest attention over all queries; mass redistributed, original values"
    settings_type = HighAttentionRedistDirectSettings
