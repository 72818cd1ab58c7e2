"""Orthogonal matching pursuit: keys and their weights chosen together, so that they carry the mass of all keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentcompact.fitting.bounded import bounded_least_squares
from agentcompact.fitting.fit import fit_bias
from agentcompact.fitting.mass_equations import column_lengths, mass_equations
from agentcompact.fitting.nnls import nnls_published
from agentcompact.fitting.selection import gather_rows, random_rows, top_entries

Mode = Literal["published", "exact"]

LOWER, UPPER = 1e-12, math.exp(7.0)
"""Bounds of a weight, as published."""
DROPPED = math.exp(-7.0)
"""Keys that end with a smaller weight are replaced."""
ROUNDS = 3
SCHEDULE = ((300, 1, 1), (1500, 2, 2), (None, 4, 2))
"""Up to so many keys: how many a step, and a refit every so many steps."""
_GRAM_ELEMENTS = 1 << 26


def matching_pursuit(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor,
    scaling: float,
    row_maximum: Tensor,
    row_sum: Tensor,
    count: int,
    *,
    mode: Mode = "published",
    normalised: bool = False,
    max_queries: int = 2048,
    max_candidates: int = 2048,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose `count` keys of each head; return their indices, ascending, and log-weights, both (heads, count).

    queries: (heads, m, d). keys: (heads, n, d). bias: (heads, n). row_maximum, row_sum: (heads, m), each query's
    highest score and its sum of exp(score - row maximum) over all entries. The key whose column
    exp(score - row maximum) has the largest product with what is missing of the row sums comes next, and the weights
    are fitted again: on the schedule of `SCHEDULE`, or after every key until the fit converges ("exact"). Keys that
    end below e^-7 are replaced, in at most three rounds.

    With `normalised` the products are those of columns of length 1, which is not published and left less residual on
    real heads. The search sees `max_queries` random queries (4 * count at least) and the `max_candidates` keys with
    the longest columns (8 * count at least; the product is at most the length times the residual's); the weights are
    those of a last fit to all queries.
    Source: Fast KV Compaction via Attention Matching (Zweiger et al. 2026), OMP keys and its fast schedule.
    """
    heads, n, _ = keys.shape
    if count >= n:
        return torch.arange(n, device=keys.device).expand(heads, n), keys.new_zeros(heads, n, dtype=torch.float32)
    width = min(n, max(max_candidates, 8 * count))
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = random_rows(queries.shape[1], max(max_queries, 4 * count), generator).to(queries.device)
    search = _Search(scaling, rows, width, count, mode, normalised)
    together = 1 if queries.device.type == "cpu" else max(1, _GRAM_ELEMENTS // width**2)
    found = []
    for first in range(0, heads, together):
        inputs = [t[first : first + together].float() for t in (queries, keys, bias, row_maximum, row_sum)]
        found.append(_pursue(search, *inputs))
    return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])


@dataclass(frozen=True)
class _Search:
    """What all heads have in common. rows: the queries to search with; width: the number of candidates."""

    scaling: float
    rows: Tensor
    width: int
    count: int
    mode: Mode
    normalised: bool


def _pursue(
    search: _Search, queries: Tensor, keys: Tensor, bias: Tensor, top: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """`matching_pursuit` of heads whose Gram matrices fit in memory together."""
    scaling, rows = search.scaling, search.rows
    sample, sample_top = queries[:, rows], top[:, rows]
    candidates = None
    some, some_bias = keys, bias
    if search.width < keys.shape[1]:
        candidates = top_entries(column_lengths(sample, keys, bias, scaling, sample_top), search.width)
        some, some_bias = gather_rows(keys, candidates), gather_rows(bias, candidates)
    gram, right = mass_equations(sample, some, some_bias, scaling, sample_top, target[:, rows])
    chosen, weights = pursue_equations(gram, right, search.count, search.mode, normalised=search.normalised)
    if candidates is not None:
        chosen = gather_rows(candidates, chosen)
    if len(rows) == queries.shape[1]:
        return chosen, weights.log().float()
    some, some_bias = gather_rows(keys, chosen), gather_rows(bias, chosen)
    refit: Literal["published", "converged"] = "published" if search.mode == "published" else "converged"
    limits = math.log(LOWER), math.log(UPPER)
    return chosen, fit_bias(queries, some, some_bias, scaling, target.log() + top, top, *limits, refit) - some_bias


def pursue_equations(
    gram: Tensor, right: Tensor, count: int, mode: Mode = "published", ridge: float = 1e-6, normalised: bool = False
) -> tuple[Tensor, Tensor]:
    """Choose from the equations AᵀA (heads, n, n) and Aᵀy (heads, n); return as `matching_pursuit`, but weights."""
    pursuit = _Pursuit(gram, right, count, mode, ridge, normalised)
    pursuit.grow()
    low = pursuit.weights < DROPPED
    chosen, weights = pursuit.chosen.clone(), pursuit.weights.clone()
    for head in low.any(dim=1).nonzero()[:, 0].tolist():
        alone = _Pursuit(gram[head : head + 1], right[head : head + 1], count, mode, ridge, normalised)
        chosen[head], weights[head] = alone.replace_dropped(chosen[head], weights[head])
    chosen, order = chosen.sort(dim=1)
    return chosen, weights.gather(1, order)


class _Pursuit:
    """The keys chosen so far of heads that grow in step.

    chosen: (heads, count), `size` of them in use. rows: (heads, count, n), their rows of the Gram matrix.
    among: (heads, count, count), float64, their products with each other. weights: (heads, size), float64.
    """

    def __init__(self, gram: Tensor, right: Tensor, count: int, mode: Mode, ridge: float, normalised: bool) -> None:
        heads, n, _ = gram.shape
        self.gram, self.right, self.count, self.mode, self.ridge = gram, right, count, mode, ridge
        lengths = gram.diagonal(dim1=1, dim2=2).double().sqrt()
        self.lengths = lengths.clamp(min=1e-30) if normalised else torch.ones_like(lengths)
        self.taken = torch.zeros(heads, n, dtype=torch.bool, device=gram.device)
        self.chosen = torch.zeros(heads, count, dtype=torch.long, device=gram.device)
        self.rows = gram.new_empty(heads, count, n)
        self.among = right.new_zeros(heads, count, count)
        self.restart(self.chosen[:, :0])

    def restart(self, chosen: Tensor) -> None:
        """Go back to these keys; those taken since stay out of the search."""
        self.size = 0
        self.weights = self.right[:, :0]
        self.missing = self.right
        if chosen.shape[1]:
            self.add(chosen)
            self.refit()

    def grow(self) -> None:
        """Add keys until there are `count`."""
        steps = 0
        while self.size < self.count:
            keys, interval = (1, 1) if self.mode == "exact" else pace(self.size)
            keys = min(keys, self.count - self.size)
            if keys > int((~self.taken).sum(dim=1).amin()):  # the replaced ones are all that is left
                self.taken.zero_().scatter_(1, self.chosen[:, : self.size], True)
            self.add((self.missing / self.lengths).masked_fill(self.taken, -math.inf).topk(keys, dim=1).indices)
            steps += 1
            if steps >= interval or self.size == self.count:
                self.refit()
                steps = 0

    def add(self, keys: Tensor) -> None:
        """Take keys (heads, k); the weights and what is missing stay as they are until the next refit."""
        old, new = self.size, self.size + keys.shape[1]
        self.chosen[:, old:new] = keys
        self.taken.scatter_(1, keys, True)
        self.rows[:, old:new] = gather_rows(self.gram, keys)
        everyone = self.chosen[:, None, :new].expand(-1, new - old, -1)
        products = self.rows[:, old:new].gather(2, everyone).double()
        self.among[:, old:new, :new] = products
        self.among[:, :new, old:new] = products.transpose(1, 2)
        self.size = new

    def refit(self) -> None:
        """Fit the weights, and find each key's product with what is still missing of the mass: Aᵀ(y - A_S w)."""
        among, right = self.among[:, : self.size, : self.size], self.right.gather(1, self.chosen[:, : self.size])
        if self.mode == "published":
            self.weights = nnls_published(among, right, LOWER, UPPER, self.ridge)
        else:
            fresh = self.size - self.weights.shape[1]
            start = torch.nn.functional.pad(self.weights, (0, fresh), value=1.0)
            tiny = 1e-10 if self.gram.dtype == torch.float64 else 1e-7
            solved = [
                bounded_least_squares(*each, LOWER, UPPER, tiny) for each in zip(among, right, start, strict=True)
            ]
            self.weights = torch.stack(solved)
        carried = self.weights.to(self.rows.dtype)[:, None] @ self.rows[:, : self.size]
        self.missing = self.right - carried[:, 0].double()

    def replace_dropped(self, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the keys (count,) of one head whose weights are too small; return both anew."""
        for _ in range(ROUNDS):
            low = weights < DROPPED
            if not bool(low.any()):
                break
            self.taken[0, chosen] = True
            self.restart(chosen[~low][None])
            self.grow()
            chosen, weights = self.chosen[0].clone(), self.weights[0]
        return chosen, weights


def pace(size: int) -> tuple[int, int]:
    """Return how many keys the next step adds where there are `size`, and after how many steps comes a refit."""
    return next((keys, steps) for limit, keys, steps in SCHEDULE if limit is None or size < limit)
