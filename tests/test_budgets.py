"""Budgets over layers and heads: exact totals, caps and floors, whatever the heads hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import TransformersEngine, compact, make_strategy, recompact
from agentcompact.errors import BudgetError, SettingsError
from agentcompact.fitting.budgets import (
    adakv_budgets,
    allocate,
    global_budgets,
    pyramid_budgets,
    share_budgets,
    uniform_budgets,
)

KINDS = ("uniform", "global", "adakv", "pyramid", "file")


def flat(counts):
    return [count for layer in counts for count in layer]


def random_scores(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [[torch.rand(n, generator=g) for n in layer] for layer in lengths]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 30, 1000])
@pytest.mark.parametrize(
    "lengths",
    [
        [[10, 10], [10, 10], [10, 10]],
        [[10, 3], [1, 40], [7, 7]],
        [[0, 5], [20, 0], [6, 6]],
        [[1, 1], [1, 1]],
        [[30] * 3] * 9,
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_totals_are_exact(kind, lengths, budget):
    shares = [[1.0 + i + 5 * j for j in range(len(layer))] for i, layer in enumerate(lengths)]
    counts = allocate(kind, random_scores(lengths), budget, shares)
    heads = sum(len(layer) for layer in lengths)
    everything = sum(flat(lengths))
    for count, n in zip(flat(counts), flat(lengths), strict=True):
        assert min(1, n) <= count <= n
    if kind == "uniform":
        assert flat(counts) == [min(budget, n) for n in flat(lengths)]
    elif kind == "adakv":
        assert [sum(layer) for layer in counts] == [min(budget * len(n), sum(n)) for n in lengths]
    else:
        assert sum(flat(counts)) == min(budget * heads, everything)


def test_uniform_is_the_least_of_budget_and_entries():
    assert uniform_budgets([[5, 2], [0, 9]], 4) == [[4, 2], [0, 4]]


def test_equal_scores_are_ranked_by_place_and_endless_ones_do_not_starve_a_head():
    scores = [[torch.ones(4), torch.ones(4)], [torch.full((4,), float("inf")), torch.zeros(4)]]
    assert global_budgets(scores, 6) == [[1, 1], [3, 1]]
    assert global_budgets(scores, 9) == [[3, 1], [4, 1]]


def test_a_partition_counts_as_a_sort_does():
    g = torch.Generator().manual_seed(1)
    scores = [[torch.randint(0, 5, (n,), generator=g).float() for n in (50, 31)] for _ in range(4)]
    for total in (8, 9, 40, 100, 323, 324):
        ranked = sorted(
            (
                (-float("inf") if position == int(row.argmax()) else -float(value), layer, head, position)
                for layer, heads in enumerate(scores)
                for head, row in enumerate(heads)
                for position, value in enumerate(row)
            ),
        )[:total]
        expected = [[sum(r[1:3] == (layer, head) for r in ranked) for head in range(2)] for layer in range(4)]
        assert global_budgets(scores, total) == expected


def test_adakv_ranks_within_each_layer():
    scores = [[torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.1, 0.0, 0.0])], [torch.ones(3) * 100, torch.ones(3)]]
    assert adakv_budgets(scores, 2) == [[3, 1], [3, 1]]
    assert adakv_budgets([[torch.tensor([1.0]), torch.tensor([0.5, 0.4, 0.3])]], 2) == [[1, 3]]


def test_a_pyramid_falls_in_equal_steps_to_a_twentieth():
    counts = pyramid_budgets([[10_000] * 2] * 11, 1000)
    firsts = [layer[0] for layer in counts]
    assert all(layer[0] == layer[1] for layer in counts)
    assert (firsts[0], firsts[5], firsts[10]) == (1950, 1000, 50)
    assert [a - b for a, b in itertools.pairwise(firsts)] == [190] * 10
    assert sum(flat(counts)) == 1000 * 22


def test_a_pyramid_of_odd_numbers_is_exact_too():
    for layers, budget in ((30, 7), (7, 13), (3, 5), (30, 1), (2, 1), (1, 9)):
        counts = pyramid_budgets([[500] * 3] * layers, budget)
        firsts = [layer[0] for layer in counts]
        assert sum(flat(counts)) == budget * 3 * layers
        assert firsts == sorted(firsts, reverse=True)


def test_what_the_first_layers_cannot_hold_goes_to_the_others_in_proportion():
    counts = [layer[0] for layer in pyramid_budgets([[1200] * 2] * 5, 1000)]
    assert counts == [1200, 1200, 1200, 1200, 200]  # of 1950, 1475, 1000, 525, 50
    wider = [layer[0] for layer in pyramid_budgets([[1500] * 2] * 5, 1000)]
    assert wider == [1500, 1500, 1270, 667, 63]  # 2,000 are left for 1000, 525, 50


def test_shares_are_proportions():
    assert share_budgets([[3, 1], [2, 2]], [[100, 100], [100, 100]], 80) == [[30, 10], [20, 20]]
    assert share_budgets([[1.0, 0.0]], [[100, 100]], 20) == [[19, 1]]  # at least one


def test_shares_are_capped_at_three_quarters_and_the_rest_flows_on():
    assert share_budgets([[8, 1], [1, 0]], [[100, 100], [100, 100]], 160) == [[75, 42], [42, 1]]
    assert share_budgets([[1, 0], [0, 0]], [[100, 100], [100, 100]], 151) == [[75, 26], [25, 25]]
    full = share_budgets([[8, 1], [1, 1]], [[100, 100], [100, 100]], 360)  # above 4 x 75
    assert sum(flat(full)) == 360
    assert full[0][0] == 100


def test_shares_that_do_not_fit():
    with pytest.raises(BudgetError, match="proportions for 1 layers, but 2"):
        share_budgets([[1, 1]], [[5, 5], [5, 5]], 4)
    with pytest.raises(BudgetError, match="layer 1: proportions for 3 heads, but it has 2"):
        share_budgets([[1, 1], [1, 1, 1]], [[5, 5], [5, 5]], 4)
    with pytest.raises(BudgetError, match="budgets_file"):
        allocate("file", random_scores([[5, 5]]), 2)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, SettingsError, "cannot be read"),
        ("[[1, 2],\n [3", SettingsError, "line 2 is no JSON"),
        ("{}", SettingsError, "a list of layers is expected"),
        ("[]", SettingsError, "a list of layers is expected"),
        ("[[1, 2], 3]", SettingsError, "layer 1: a list with a number for each head"),
        ('[[1, 2], [3, "x"]]', SettingsError, "layer 1, head 1: 'x' is no proportion"),
        ("[[1, -2], [3, 4]]", SettingsError, "layer 0, head 1: -2 is no proportion"),
        ("[[1, NaN], [3, 4]]", SettingsError, "layer 0, head 1: nan is no proportion"),
        ("[[1, true], [3, 4]]", SettingsError, "layer 0, head 1: True is no proportion"),
        ("[[0, 0], [0, 0]]", SettingsError, "all proportions are 0"),
        ("[[1, 2]]", BudgetError, "proportions for 1 layers, but 2 layers"),
        ("[[1, 2], [3]]", BudgetError, "layer 1: proportions for 1 heads, but it has 2 KV heads"),
    ],
)
def test_files_of_proportions_that_do_not_fit(tmp_path, content, error, message):
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(40))
    path = tmp_path / "shares.json"
    if content is not None:
        path.write_text(content)
    before = engine.counters.prefilled_tokens
    for run in (
        lambda: recompact(engine, cache, "random", ratio=4, budgets="file", budgets_file=str(path)),
        lambda: compact(engine, tiny_text(40), "random", budgets="file", budgets_file=str(path)),
    ):
        with pytest.raises(error, match=message):
            run()
    assert engine.counters.prefilled_tokens == before  # found out before any work


def test_a_kind_file_without_its_file_is_refused():
    with pytest.raises(SettingsError, match="budgets=file needs a budgets_file"):
        make_strategy("snapkv", budgets="file")


@pytest.mark.parametrize("kind", ["global", "adakv"])
def test_a_floor_that_every_head_gets(kind):
    generator = torch.Generator().manual_seed(3)
    scores = [[torch.rand(50, generator=generator) * 10.0**head for head in range(3)] for _ in range(2)]
    without, with_floor = allocate(kind, scores, 20), allocate(kind, scores, 20, floor=0.25)
    assert min(min(layer) for layer in without) == 1
    assert min(min(layer) for layer in with_floor) == 5
    assert sum(map(sum, with_floor)) == sum(map(sum, without)) == 20 * 6
    assert allocate(kind, scores, 20, floor=1.0) == [[20] * 3] * 2
    assert allocate(kind, [[torch.rand(3), torch.rand(50)]], 20, floor=1.0) == [[3, 37]]
