"""high_attn: the keys with the highest attention, biases by NNLS, values by least squares."""

from __future__ import annotations

from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.attention_matching_settings import PresetSettings


class HighAttention(AttentionMatching):
    """RMS selection over all queries, NNLS biases, ridge least squares for the values.

    Source: Fast KV Compaction via Attention Matching (Zweiger et al. 2026), its baseline selection.
    """

    name = "high_attn"
    summary = "keys of the highest attention over all queries; biases and values fitted to the full cache"
    settings_type = PresetSettings
