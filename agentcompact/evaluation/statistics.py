"""Intervals and normalised scores, from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Groups = Sequence[Sequence[float]]
"""The scores of each document's questions."""

BLOCK = 2_000_000
"""Numbers drawn at a time."""


def bootstrap_interval(groups: Groups, seed: int = 0, draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Give the two-stage bootstrap interval of the mean of all scores.

    Documents are drawn with replacement, then questions within each, as many as it has. Documents without scores are
    left out. Raises ValueError where there is no score at all.
    """
    kept = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not kept:
        raise ValueError("there is no score to bootstrap")
    if not (0 < level < 1 and draws > 0):
        raise ValueError(f"level must lie between 0 and 1 and draws be positive, not {level} and {draws}")
    sizes = np.array([len(group) for group in kept])
    starts = np.cumsum(sizes) - sizes
    scores = np.concatenate(kept)
    documents, longest = len(kept), int(sizes.max())
    slots = np.arange(longest)
    generator = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    step = max(1, BLOCK // (documents * longest))
    for first in range(0, draws, step):
        count = min(step, draws - first)
        drawn = generator.integers(documents, size=(count, documents))
        drawn_sizes = sizes[drawn][..., None]
        within = (generator.random((count, documents, longest)) * drawn_sizes).astype(np.int64)
        used = slots < drawn_sizes
        values = np.where(used, scores[starts[drawn][..., None] + within], 0.0)
        means.append(values.sum(axis=(1, 2)) / used.sum(axis=(1, 2)))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_bootstrap(
    a_groups: Groups, b_groups: Groups, seed: int = 0, draws: int = 2000, level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Give the mean of a - b over the same questions, and its two-stage bootstrap interval.

    Raises ValueError where the groups do not hold the same numbers of questions.
    """
    if [len(group) for group in a_groups] != [len(group) for group in b_groups]:
        raise ValueError("paired scores must be of the same documents and questions")
    differences = [
        [float(a) - float(b) for a, b in zip(a_group, b_group, strict=True)]
        for a_group, b_group in zip(a_groups, b_groups, strict=True)
    ]
    interval = bootstrap_interval(differences, seed=seed, draws=draws, level=level)
    return float(np.mean([value for group in differences for value in group])), interval


def normalised_utility(accuracy: float, full: float, none: float) -> float | None:
    """Give 100 (accuracy - none) / (full - none), or None where the document gains nothing: full is not above none."""
    if not full > none:
        return None
    return 100.0 * ((accuracy - none) / (full - none))
