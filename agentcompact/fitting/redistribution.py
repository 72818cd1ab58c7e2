"""Uniform redistribution of the attention mass that dropped entries had."""

from __future__ import annotations

import torch
from torch import Tensor


def redistribute(selected_mass: Tensor, total_mass: Tensor, bias: Tensor, lower: float, upper: float) -> Tensor:
    """Give each selected entry an equal share of the missing mass; return the new biases (heads, t).

    selected_mass: (heads, t), mean unnormalised mass m_j of each selected entry under its bias so far.
    total_mass: (heads,), mean mass that the selection must carry, on the same scale. bias: (heads, t), the biases
    so far. The new bias is bias + log((m_j + missing / t) / m_j), the missing mass being total minus selected and
    never negative; the addition is kept within [lower, upper], and an entry without any mass gets `upper`.

    Source: the write-up "Compaction", section "Choosing β".
    """
    t = selected_mass.shape[-1]
    missing = (total_mass - selected_mass.sum(dim=-1)).clamp(min=0)
    tiny = torch.finfo(selected_mass.dtype).tiny
    growth = ((selected_mass + missing[:, None] / t) / selected_mass.clamp(min=tiny)).clamp(min=tiny).log()
    growth = torch.where(selected_mass > 0, growth, torch.full_like(growth, upper))
    return bias + growth.clamp(lower, upper)
