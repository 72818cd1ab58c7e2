"""pyramidkv: SnapKV's scores, with budgets that fall over the layers."""

from __future__ import annotations

from pydantic import Field

from agentcompact.fitting.budgets import BudgetKind
from agentcompact.strategies.snapkv import SnapKV, SnapKVSettings


class PyramidKVSettings(SnapKVSettings):
    budgets: BudgetKind = Field("pyramid", description="entries of each head: fewer in deeper layers, or another kind")


class PyramidKV(SnapKV):
    """SnapKV whose budgets fall linearly over depth. Source: PyramidKV (Cai et al. 2024)."""

    name = "pyramidkv"
    summary = "as snapkv, with more entries in the first layers and few in the last"
    settings_type = PyramidKVSettings
