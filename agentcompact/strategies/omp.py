"""omp: keys and biases by orthogonal matching pursuit of the attention mass, values by least squares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.attention_matching_settings import PresetSettings


class OrthogonalMatchingPursuitSettings(PresetSettings):
    keys: Literal["highest_attention", "two_pass", "omp"] = Field("omp", description="key selection")


class OrthogonalMatchingPursuit(AttentionMatching):
    """OMP keys with their NNLS weights, ridge least squares for the values.

    Source: Fast KV Compaction via Attention Matching (Zweiger et al. 2026), its OMP variant.
    """

    name = "omp"
    summary = "keys and biases by pursuing the attention mass greedily, values fitted; slow"
    settings_type = OrthogonalMatchingPursuitSettings
