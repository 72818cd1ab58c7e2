"""How many entries each head keeps: the same everywhere, by a ranking of scores, by depth, or as a file says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agentcompact.errors import BudgetError, SettingsError

BudgetKind = Literal["uniform", "global", "adakv", "pyramid", "file"]

Counts = list[list[int]]
"""Entries of each head of each layer."""

PYRAMID_BETA = 20.0
"""The last layer gets the mean budget divided by this (PyramidKV)."""
SHARE_CAP = 0.75
"""Most of a head's entries that a file's proportions give it, as long as the total fits under that."""


def allocate(
    kind: BudgetKind,
    scores: Sequence[Sequence[Tensor]],
    budget: int,
    shares: Sequence[Sequence[float]] | None = None,
    floor: float = 0.0,
) -> Counts:
    """Return how many entries each head of each layer keeps, `budget` of them a head on average.

    scores: per layer and head (n,), n differing where it does; heads without entries get none. shares: the
    proportions of kind "file". floor: fraction of the budget that every head gets at least, of kinds that rank
    ("global", "adakv"). The counts add up to budget times heads exactly (of each layer for "adakv"), or to all
    there is where that is less; "uniform" keeps min(budget, n) of each head. Raises BudgetError for a missing or
    unfit `shares`.
    """
    lengths = [[len(head) for head in layer] for layer in scores]
    total = budget * sum(len(layer) for layer in lengths)
    least = max(1, math.floor(floor * budget))
    if kind == "global":
        return global_budgets(scores, total, least)
    if kind == "adakv":
        return adakv_budgets(scores, budget, least)
    if kind == "pyramid":
        return pyramid_budgets(lengths, budget)
    if kind == "file":
        if shares is None:
            raise BudgetError("budgets of kind 'file' need a file of proportions (budgets_file)")
        return share_budgets(shares, lengths, total)
    return uniform_budgets(lengths, budget)


def uniform_budgets(lengths: Sequence[Sequence[int]], budget: int) -> Counts:
    """Return min(budget, n) for each head of n entries."""
    return [[min(budget, n) for n in layer] for layer in lengths]


def global_budgets(scores: Sequence[Sequence[Tensor]], total: int, least: int = 1) -> Counts:
    """Share `total` entries by one ranking of the scores of all layers and heads; at least `least` a head.

    scores: per layer and head (n,), n differing where it does. Returns the count of each head of each layer (none for
    a head without scores); the counts add up to `total` exactly, or to all there is where that is less, or to `least`
    a head where that is more. Equal scores are ranked by layer, head and position.
    """
    heads = [head.float().cpu() for layer in scores for head in layer]
    sizes = torch.tensor([len(head) for head in heads])
    everything = torch.cat(heads).clamp(max=torch.finfo(torch.float32).max)
    starts = (sizes.cumsum(0) - sizes).tolist()
    first = [start + head.topk(min(least, len(head))).indices for start, head in zip(starts, heads, strict=True)]
    best = torch.cat(first) if first else torch.empty(0, dtype=torch.long)
    everything[best] = float("inf")
    kept = torch.from_numpy(_highest(everything.numpy(), max(total, len(best))))
    owners = torch.repeat_interleave(torch.arange(len(heads)), sizes)
    counts = iter(owners[kept].bincount(minlength=len(heads)).tolist())
    return [[int(next(counts)) for _ in layer] for layer in scores]


def _highest(values: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of the `count` highest values, the earlier of equal ones: a partition, where a sort is slow."""
    if count >= len(values):
        return np.ones(len(values), dtype=bool)
    place = len(values) - count
    threshold = np.partition(values, place)[place]
    mask: np.ndarray = values > threshold
    mask[np.flatnonzero(values == threshold)[: count - int(mask.sum())]] = True
    return mask


def adakv_budgets(scores: Sequence[Sequence[Tensor]], budget: int, least: int = 1) -> Counts:
    """Share `budget` entries per head by one ranking within each layer; at least `least` a head.

    Source: Ada-KV (Feng et al. 2024), whose floor of uniform budgets is `least`.
    """
    return [global_budgets([layer], budget * len(layer), least)[0] for layer in scores]


def pyramid_budgets(lengths: Sequence[Sequence[int]], budget: int, beta: float = PYRAMID_BETA) -> Counts:
    """Let budgets fall linearly over depth, from budget * (2 - 1/beta) in the first layer to budget / beta in the last.

    lengths: entries of each head of each layer. No head gets more than it has; the excess goes to the others in
    proportion. The total is exactly `budget` times heads, or all there is. Source: PyramidKV (Cai et al. 2024).
    """
    depth = len(lengths)
    last = budget / beta
    targets = [budget if depth == 1 else last + 2 * (budget - last) * (1 - i / (depth - 1)) for i in range(depth)]
    alike = [set(layer) for layer in lengths]
    if all(len(each) == 1 for each in alike) and len({len(layer) for layer in lengths}) == 1:
        each_layer = _fill(targets, [layer[0] for layer in lengths], budget * depth)
        return [[count] * len(layer) for count, layer in zip(each_layer, lengths, strict=True)]
    total = budget * sum(len(layer) for layer in lengths)
    weights = [target for target, layer in zip(targets, lengths, strict=True) for _ in layer]
    return _nested(_fill(weights, [n for layer in lengths for n in layer], total), lengths)


def share_budgets(shares: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], total: int) -> Counts:
    """Share `total` entries in given proportions, one number per layer and head; at least one a head.

    A head gets at most 0.75 of its entries, unless the total does not fit under that; the excess goes to the others
    in proportion. Raises BudgetError where the proportions do not fit the layers and heads.
    """
    check_shares(shares, [len(layer) for layer in lengths])
    entries = [n for layer in lengths for n in layer]
    caps = [min(n, max(1, math.floor(SHARE_CAP * n))) for n in entries]
    if sum(caps) < total:
        caps = entries
    return _nested(_fill([share for row in shares for share in row], caps, total), lengths)


def check_shares(shares: Sequence[Sequence[float]], heads: Sequence[int]) -> None:
    """Raise BudgetError, naming the place, where proportions are not one for each of `heads` heads a layer."""
    if len(shares) != len(heads):
        raise BudgetError(f"proportions for {len(shares)} layers, but {len(heads)} layers can be compacted")
    for index, (row, count) in enumerate(zip(shares, heads, strict=True)):
        if len(row) != count:
            raise BudgetError(f"layer {index}: proportions for {len(row)} heads, but it has {count} KV heads")


def read_shares(path: str) -> list[list[float]]:
    """Read proportions from a JSON file: a list with one list of numbers per compactable layer, one number a KV head.

    Raises SettingsError, naming the file and the place, for a file that cannot be read or that holds anything else.
    """
    try:
        read: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"budgets_file={path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise SettingsError(f"budgets_file={path}: line {error.lineno} is no JSON ({error.msg})") from error
    if not isinstance(read, list) or not read:
        raise SettingsError(f"budgets_file={path}: a list of layers is expected, each a list with a number a head")
    for layer, row in enumerate(read):
        if not isinstance(row, list) or not row:
            raise SettingsError(f"budgets_file={path}: layer {layer}: a list with a number for each head is expected")
        for head, share in enumerate(row):
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not number or not math.isfinite(share) or share < 0:
                raise SettingsError(
                    f"budgets_file={path}: layer {layer}, head {head}: {share!r} is no proportion (a number from 0 on)"
                )
    if not any(share for row in read for share in row):
        raise SettingsError(f"budgets_file={path}: all proportions are 0")
    return [[float(share) for share in row] for row in read]


def _fill(weights: Sequence[float], caps: Sequence[int], total: int) -> list[int]:
    """Share `total` in proportion to `weights`, at most `caps` and at least one each where the cap allows.

    Water-filling: what a cap cuts off is shared by the others. The sum is `total`, or all the caps hold, or one each.
    """
    most = np.array(caps, dtype=np.int64)
    least = np.minimum(most, 1)
    total = int(min(max(total, int(least.sum())), int(most.sum())))
    scale = np.array(weights, dtype=np.float64)
    scale = np.maximum(scale / max(scale.max(), np.finfo(np.float64).tiny), 1e-9)  # a weight of 0 is filled last
    low, high = 0.0, 2.0 * (float(most.max()) + 1) / float(scale.min())
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.clip(level * scale, least, most).sum() < total else (low, level)
    ideal = np.clip(high * scale, least, most)
    counts = np.floor(ideal + 1e-6).astype(np.int64)
    remainder = np.round(ideal - counts, 6)
    while counts.sum() != total:
        more = counts.sum() < total
        order = np.argsort(-remainder if more else remainder, kind="stable")
        order = order[counts[order] < most[order] if more else counts[order] > least[order]]
        counts[order[: abs(total - int(counts.sum()))]] += 1 if more else -1
    return [int(count) for count in counts]


def _nested(counts: Sequence[int], lengths: Sequence[Sequence[int]]) -> Counts:
    """Put counts that run over all layers and heads back into layers."""
    following = iter(counts)
    return [[next(following) for _ in layer] for layer in lengths]
