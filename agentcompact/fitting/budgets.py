"""How many entries each head keeps: the same everywhere, or whatever one ranking of all scores gives it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_budgets(scores: Sequence[Sequence[Tensor]], total: int) -> list[list[int]]:
    """Share `total` entries by one ranking of the scores of all layers and heads; at least one a head.

    scores: per layer and head (n,), n differing where it does. Returns the count of each head of each layer (none for
    a head without scores); the counts add up to `total` exactly, or to all there is where that is less, or to one a
    head where that is more. Equal scores are ranked by layer, head and position.
    """
    heads = [head.float().cpu() for layer in scores for head in layer]
    sizes = torch.tensor([len(head) for head in heads])
    owners = torch.repeat_interleave(torch.arange(len(heads)), sizes)
    everything = torch.cat(heads)
    starts = (sizes.cumsum(0) - sizes).tolist()
    best = [start + int(head.argmax()) for start, head in zip(starts, heads, strict=True) if len(head)]
    everything[best] = float("inf")
    order = everything.argsort(descending=True, stable=True)[: max(total, len(best))]
    counts = iter(owners[order].bincount(minlength=len(heads)).tolist())
    return [[int(next(counts)) for _ in layer] for layer in scores]
