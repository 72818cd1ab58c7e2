"""two_pass: shortlist by a few queries, select by all, redistribute the mass, keep the original values."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.attention_matching_settings import PresetSettings


class TwoPassSettings(PresetSettings):
    keys: Literal["highest_attention", "two_pass"] = Field("two_pass", description="key selection")
    bias: Literal["nnls", "redistribute", "none"] = Field(
        "redistribute", description="how the entries get their biases"
    )
    values: Literal["least_squares", "direct"] = Field("direct", description="fitted or original values")


class TwoPass(AttentionMatching):
    """Two-pass key selection, uniform redistribution, direct values. Source: the write-up "Compaction"."""

    name = "two_pass"
    summary = "fast: a shortlist by a few queries, the selection by all; mass redistributed, original values"
    settings_type = TwoPassSettings
