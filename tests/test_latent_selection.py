"""Preservers, anchors and diversifiers against plain loops; equations 6 and 7."""

from __future__ import annotations

import pytest
import torch

from agentcompact.errors import BudgetError
from agentcompact.fitting.latent_selection import (
    anchor_rows,
    farthest_first,
    other_rows,
    preserver_rows,
    slot_counts,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("budget", "shares", "expected"),
    [
        (128, (0.75, 0.25), (32, 8)),  # the paper's example: 96 preservers, 8 anchors, 24 diversifiers
        (4, (0.75, 0.25), (2, 1)),
        (1, (0.75, 0.25), (1, 1)),
        (10, (0.0, 1.0), (10, 10)),
        (10, (1.0, 0.0), (2, 1)),
    ],
)
def test_slot_counts(budget, shares, expected):
    assert slot_counts(budget, *shares) == expected


def test_slot_counts_refuses_nothing():
    with pytest.raises(BudgetError, match="budget 0"):
        slot_counts(0, 0.75, 0.25)


def plain_preservers(scores, total, free, spare_first):
    """Take the best again and again, as long as its head may still give one."""
    left = [
        [len(head) - f for head, f in zip(layer, row, strict=True)] for layer, row in zip(scores, free, strict=True)
    ]
    ranked = sorted(
        (
            (-float(score), layer, head, row)
            for layer, heads in enumerate(scores)
            for head, values in enumerate(heads)
            for row, score in enumerate(values)
            if not (spare_first and row == 0)
        )
    )
    chosen = [[[] for _ in layer] for layer in scores]
    taken = 0
    for _, layer, head, row in ranked:
        if taken < total and left[layer][head]:
            chosen[layer][head].append(row)
            left[layer][head] -= 1
            taken += 1
    return [[sorted(rows) for rows in layer] for layer in chosen]


@pytest.mark.parametrize("total", [0, 5, 17, 40])
@pytest.mark.parametrize("spare_first", [True, False])
def test_preservers_are_one_ranking_of_everything(total, spare_first):
    scores = [[torch.rand(9, generator=seeded(h + 2 * layer)) ** (1 + 3 * h) for h in range(2)] for layer in range(3)]
    scores[0][0][0] = 5.0  # the first entry of a head is the best of all
    free = [[2, 2], [2, 1], [3, 2]]
    found = preserver_rows(scores, total, free, spare_first=spare_first)
    assert [[rows.tolist() for rows in layer] for layer in found] == plain_preservers(scores, total, free, spare_first)
    assert sum(len(rows) for layer in found for rows in layer) == total
    assert (0 in found[0][0].tolist()) == (total > 0 and not spare_first)


def test_preservers_differ_between_heads_and_leave_room():
    scores = [[torch.full((8,), 2.0), torch.full((8,), 1.0)]]
    found = preserver_rows(scores, 8, [[3, 3]], spare_first=True)[0]
    assert [rows.tolist() for rows in found] == [[1, 2, 3, 4, 5], [1, 2, 3]]


def test_heads_without_entries_give_none():
    found = preserver_rows([[torch.empty(0), torch.rand(4)]], 2, [[0, 1]], spare_first=True)[0]
    assert [len(rows) for rows in found] == [0, 2]


def test_anchors_are_the_first_entry_and_the_most_attended():
    attention = torch.tensor([0.0, 0.5, 0.9, 0.1, 0.7])
    taken = torch.tensor([False, False, True, False, False])
    assert anchor_rows(attention, taken, 3).tolist() == [0, 4, 1]
    assert anchor_rows(attention, taken, 9).tolist() == [0, 4, 1, 3]
    assert anchor_rows(attention, taken, 0).tolist() == []


def plain_farthest(keys, seeds, allowed, count):
    chosen = list(seeds)
    for _ in range(count):
        best, where = -1.0, None
        for row in range(len(keys)):
            if row in chosen or not allowed[row]:
                continue
            nearest = min(float((keys[row] - keys[other]).square().sum()) for other in chosen)
            if nearest > best:
                best, where = nearest, row
        if where is None:
            break
        chosen.append(where)
    return chosen[len(seeds) :]


@pytest.mark.parametrize("seed", range(5))
def test_farthest_first_is_the_plain_loop(seed):
    """Distances count anchors and diversifiers only: entries that are not allowed are no reference."""
    keys = torch.randn(30, 6, generator=seeded(seed), dtype=torch.float64)
    allowed = torch.rand(30, generator=seeded(seed + 100)) > 0.3
    seeds = torch.tensor([3, 17])
    allowed[seeds] = True
    assert farthest_first(keys, seeds, allowed, 8).tolist() == plain_farthest(keys, [3, 17], allowed, 8)


def test_farthest_first_ends_where_nothing_is_left():
    keys = torch.randn(4, 2, generator=seeded())
    assert farthest_first(
        keys, torch.tensor([0]), torch.tensor([True, True, False, True]), 9
    ).sort().values.tolist() == [
        1,
        3,
    ]


@pytest.mark.parametrize("initialiser", ["mix", "anchors", "diversifiers", "random", "recent"])
def test_every_initialiser_takes_what_the_preservers_left(initialiser):
    keys, attention = torch.randn(20, 4, generator=seeded(1)), torch.rand(20, generator=seeded(2))
    taken = torch.zeros(20, dtype=torch.bool)
    taken[[2, 5, 19]] = True
    rows = other_rows(initialiser, keys, attention, taken, (8, 2), seeded(3))
    assert len(rows) == 8
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert not taken[rows].any()
    again = other_rows(initialiser, keys, attention, taken, (8, 2), seeded(3))
    assert torch.equal(rows, again)


def test_initialisers_are_what_they_say():
    keys, attention = torch.randn(20, 4, generator=seeded(1)), torch.rand(20, generator=seeded(2))
    taken = torch.zeros(20, dtype=torch.bool)
    taken[19] = True

    def rows(kind, counts=(6, 2)):
        return other_rows(kind, keys, attention, taken, counts, seeded(3)).tolist()

    best = attention.clone()
    best[19], best[0] = -1, 9
    assert rows("recent") == [13, 14, 15, 16, 17, 18]
    assert rows("anchors") == sorted(best.argsort(descending=True)[:6].tolist())
    assert rows("diversifiers") == sorted([0, *plain_farthest(keys, [0], ~taken, 5)])
    anchors = best.argsort(descending=True)[:2].tolist()
    assert rows("mix") == sorted([*anchors, *plain_farthest(keys, anchors, ~taken, 4)])
    assert rows("random") != other_rows("random", keys, attention, taken, (6, 2), seeded(4)).tolist()
    assert len(rows("mix", (40, 2))) == 19
