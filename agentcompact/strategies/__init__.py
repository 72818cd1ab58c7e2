"""Strategies: one file a method, one registry, one interface."""

from agentcompact.strategies.base import (
    CompactionRequest,
    CompactionResult,
    HeadGroup,
    Phases,
    Strategy,
    StrategySettings,
    head_groups,
)
from agentcompact.strategies.blocks import compact_in_blocks
from agentcompact.strategies.registry import make_strategy, register_strategy, strategy_class, strategy_names

__all__ = [
    "CompactionRequest",
    "CompactionResult",
    "HeadGroup",
    "Phases",
    "Strategy",
    "StrategySettings",
    "compact_in_blocks",
    "head_groups",
    "make_strategy",
    "register_strategy",
    "strategy_class",
    "strategy_names",
]
