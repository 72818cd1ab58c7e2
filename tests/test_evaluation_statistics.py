"""Intervals and normalised scores, against a slow plain reference and cases known beforehand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agentcompact.evaluation import statistics
from agentcompact.evaluation.statistics import bootstrap_interval, normalised_utility, paired_bootstrap


def plain_interval(groups, draws, level=0.95):
    """The same bootstrap, one draw at a time."""
    generator = random.Random(3)
    means = []
    for _ in range(draws):
        scores = [
            generator.choice(document)
            for document in (generator.choice(groups) for _ in groups)
            for _ in range(len(document))
        ]
        means.append(sum(scores) / len(scores))
    return tuple(np.quantile(means, [(1 - level) / 2, (1 + level) / 2]))


@pytest.mark.parametrize("level", [0.95, 0.5])
def test_interval_is_that_of_the_plain_reference(level):
    generator = random.Random(1)
    groups = [
        [float(generator.random() < p)] * 2 + [generator.random()] * (i + 1) for i, p in enumerate((0.2, 0.5, 0.9))
    ]
    groups += [[0.0], [1.0, 0.25, 0.5]]
    found = bootstrap_interval(groups, draws=20_000, level=level)
    assert found == pytest.approx(plain_interval(groups, 20_000, level), abs=0.015)


def test_known_intervals():
    assert bootstrap_interval([[1.0, 1.0], [1.0] * 7, [1.0]]) == (1.0, 1.0)
    assert bootstrap_interval([[0.0, 0.0], [0.0]]) == (0.0, 0.0)
    assert bootstrap_interval([[0.5]]) == (0.5, 0.5)
    assert bootstrap_interval([[], [1.0, 1.0], []]) == (1.0, 1.0)
    # Documents that agree within themselves: the mean of three drawn documents is 0 or 1 at the ends.
    assert bootstrap_interval([[0.0] * 50, [1.0] * 50, [0.5] * 50]) == (0.0, 1.0)


def test_one_document_is_a_bootstrap_of_its_questions():
    scores = [1.0] * 30 + [0.0] * 70
    low, high = bootstrap_interval([scores], draws=20_000)
    spread = 1.96 * (0.3 * 0.7 / 100) ** 0.5
    assert low == pytest.approx(0.3 - spread, abs=0.015)
    assert high == pytest.approx(0.3 + spread, abs=0.015)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        groups = [(generator.random(15) < generator.beta(3, 3)).astype(float).tolist() for _ in range(20)]
        low, high = bootstrap_interval(groups, draws=300)
        covered += low <= 0.5 <= high
    assert 0.88 <= covered / 200 <= 1.0


def test_interval_does_not_change(monkeypatch):
    groups = [[0.0, 1.0, 1.0], [0.5, 0.0]]
    assert bootstrap_interval(groups) == bootstrap_interval(groups)
    assert bootstrap_interval(groups, seed=1) == bootstrap_interval(groups, seed=1)
    whole = bootstrap_interval(groups, draws=4000)
    monkeypatch.setattr(statistics, "BLOCK", 60)  # 10 draws at a time
    assert bootstrap_interval(groups, draws=4000) == pytest.approx(whole, abs=0.06)


@pytest.mark.parametrize(
    ("groups", "arguments"), [([], {}), ([[]], {}), ([[1.0]], {"level": 1}), ([[1.0]], {"draws": 0})]
)
def test_interval_refuses(groups, arguments):
    with pytest.raises(ValueError, match=r"no score|level must"):
        bootstrap_interval(groups, **arguments)


def test_paired_bootstrap():
    a = [[1.0, 0.0, 1.0], [0.0, 1.0]]
    b = [[0.5, -0.5, 0.5], [-0.5, 0.5]]
    assert paired_bootstrap(a, a) == (0.0, (0.0, 0.0))
    assert paired_bootstrap(a, b) == (0.5, (0.5, 0.5))  # pairing takes away what the questions differ by
    mean, (low, high) = paired_bootstrap(a, [[0.0] * 3, [0.0] * 2])
    assert mean == pytest.approx(0.6)
    assert (low, high) == bootstrap_interval(a)
    with pytest.raises(ValueError, match="same documents and questions"):
        paired_bootstrap(a, [[1.0], [1.0, 0.0]])


def test_normalised_utility():
    assert normalised_utility(0.8, 0.8, 0.1) == 100
    assert normalised_utility(0.1, 0.8, 0.1) == 0
    assert normalised_utility(0.45, 0.8, 0.1) == pytest.approx(50)
    assert normalised_utility(0.9, 0.8, 0.1) > 100
    assert normalised_utility(0.0, 0.8, 0.1) < 0
    assert normalised_utility(0.5, 0.5, 0.5) is None
    assert normalised_utility(0.5, 0.4, 0.5) is None
