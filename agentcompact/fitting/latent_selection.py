"""Which original entries a latent compaction begins with: preservers, anchors and diversifiers.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026), section 3.2, equations 6 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from agentcompact.errors import BudgetError

Initialiser = Literal["mix", "anchors", "diversifiers", "random", "recent", "attention_matching"]
"""How the entries beside the preservers are chosen; "mix" is published, the next four are the ablations of its table 1.
"attention_matching" is another strategy's result, and selects nothing here."""

SlotCounts = tuple[int, int]
"""Anchors and diversifiers together (M) of one head, and the anchors among them."""


def slot_counts(budget: int, preserver_share: float, anchor_share: float) -> SlotCounts:
    """Return (M, anchors) of a head for an average budget B >= 1 of entries per layer and KV head.

    M = max(2, round(B (1 - preserver_share))), at most B, and max(1, round(M anchor_share)) of them are anchors. Raises
    BudgetError for a budget below 1.
    """
    if budget < 1:
        raise BudgetError(f"budget {budget} is too small: at least one entry per head is kept")
    both = min(budget, max(2, round(budget * (1 - preserver_share))))
    return both, min(both, max(1, round(both * anchor_share)))


def preserver_rows(
    scores: Sequence[Sequence[Tensor]], total: int, free: Sequence[Sequence[int]], *, spare_first: bool
) -> list[list[Tensor]]:
    """Return the rows of each head's preservers: the `total` highest scores of all layers, heads and positions.

    scores: per layer and head (n,). free: how many entries of each head must be left for anchors and diversifiers.
    spare_first: whether the first entry of each head is left too (it counts as an anchor). The result is per layer and
    head (p,) int64, ascending; fewer than `total` where there are not enough. Of equal scores the earlier layer, head
    and position win.
    """
    heads = [head.float().cpu() for layer in scores for head in layer]
    kept = [number for layer in free for number in layer]
    rows, values, owners = [], [], []
    for owner, (head, left) in enumerate(zip(heads, kept, strict=True)):
        ranked = head.clone()
        if spare_first and left and len(ranked):
            ranked[0] = float("-inf")
        order = ranked.argsort(descending=True, stable=True)[: max(0, len(head) - left)].sort().values
        rows.append(order)
        values.append(ranked[order])
        owners.append(torch.full_like(order, owner))
    best = torch.cat(values).argsort(descending=True, stable=True)[: max(0, total)]
    picked, of_head = torch.cat(rows)[best], torch.cat(owners)[best]
    chosen = iter([picked[of_head == owner].sort().values for owner in range(len(heads))])
    return [[next(chosen) for _ in layer] for layer in scores]


def other_rows(
    initialiser: Initialiser,
    keys: Tensor,
    attention: Tensor | None,
    taken: Tensor,
    counts: SlotCounts,
    generator: torch.Generator,
) -> Tensor:
    """Return the rows of a head's entries beside its preservers, (M,) int64 in ascending order.

    keys: (n, head_dim). attention: (n,), the highest teacher attention of each entry (equation 6), for the kinds that
    have anchors. taken: (n,), True for preservers, which are not chosen again but count in no distance. counts: (M,
    anchors); fewer where fewer entries are left. generator: on the CPU, for "random".
    """
    both, anchors = counts
    open_rows = torch.nonzero(~taken)[:, 0]
    both = min(both, len(open_rows))
    if both == 0:
        return open_rows[:0]
    if initialiser == "recent":
        return open_rows[-both:]
    if initialiser == "random":
        order = torch.randperm(len(open_rows), generator=generator)[:both].to(open_rows.device)
        return open_rows[order].sort().values
    if initialiser == "diversifiers":
        seeds = open_rows[:1]
    else:
        if attention is None:
            raise ValueError(f"initialiser '{initialiser}' needs the teacher's attention")
        seeds = anchor_rows(attention, taken, both if initialiser == "anchors" else min(both, anchors))
    added = farthest_first(keys, seeds, ~taken, both - len(seeds))
    return torch.cat([seeds, added]).sort().values


def anchor_rows(attention: Tensor, taken: Tensor, count: int) -> Tensor:
    """Return `count` anchors: the first entry that is not taken, and those with the highest teacher attention.

    attention: (n,). taken: (n,) bool. The result is (count,) int64, fewer where fewer are left; equation 6.
    """
    if count < 1:
        return torch.empty(0, dtype=torch.long, device=attention.device)
    scores = attention.float().masked_fill(taken, float("-inf"))
    scores[torch.nonzero(~taken)[:1, 0]] = float("inf")
    order = scores.argsort(descending=True, stable=True)
    return order[: min(count, int((~taken).sum()))]


def farthest_first(keys: Tensor, seeds: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Return `count` more rows, each the farthest from its nearest among the seeds and the rows chosen before.

    keys: (n, head_dim). seeds: (s,), at least one. allowed: (n,) bool, which rows may be chosen. Squared Euclidean
    distance in float32, or float64 where the keys are; of equal distances the earlier row wins. Source: equation 7,
    farthest-first traversal (Gonzalez 1985).
    """
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    nearest = wide.new_full((len(wide),), float("inf"))
    for seed in seeds.tolist():
        nearest = torch.minimum(nearest, (wide - wide[seed]).square().sum(dim=1))
    closed = ~allowed.clone()
    closed[seeds] = True
    chosen = []
    for _ in range(min(count, int((~closed).sum()))):
        row = int(nearest.masked_fill(closed, float("-inf")).argmax())
        chosen.append(row)
        closed[row] = True
        nearest = torch.minimum(nearest, (wide - wide[row]).square().sum(dim=1))
    return torch.tensor(chosen, dtype=torch.long, device=keys.device)
