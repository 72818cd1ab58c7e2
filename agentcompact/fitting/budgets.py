"""How many entries each head keeps: the same everywhere, or whatever one ranking of all scores gives it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_budgets(scores: Sequence[Sequence[Tensor]], total: int) -> list[list[int]]:
    """Share `total` entries by one ranking of the scores of all layers and heads; at least one a head.

    scores: per layer and head (n,), n differing where it does. Returns the count of each head of
    each layer; the counts add up to `total` exactly, or to all there is where that is less, or to one a head where
    that is more. Equal scores are ranked by layer, head and position.
    """
    flat = [[head.float() for head in layer] for layer in scores]
    sizes = [[len(head) for head in layer] for layer in flat]
    owners = torch.repeat_interleave(
        torch.arange(sum(len(layer) for layer in sizes)), torch.tensor([n for layer in sizes for n in layer])
    )
    everything = torch.cat([head for layer in flat for head in layer]).cpu()
    heads = int(owners[-1]) + 1
    first = torch.tensor([0, *torch.tensor([n for layer in sizes for n in layer]).cumsum(0)[:-1].tolist()])
    best = first + torch.tensor([int(head.argmax()) for layer in flat for head in layer])
    everything[best] = float("inf")
    order = everything.argsort(descending=True, stable=True)[: max(total, heads)]
    counts = owners[order].bincount(minlength=heads).tolist()
    shared, place = [], 0
    for layer in sizes:
        shared.append([int(count) for count in counts[place : place + len(layer)]])
        place += len(layer)
    return shared
