"""Strategies against one of them, question by question: the same documents, the same ratio, a paired bootstrap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from agentcompact.errors import SettingsError
from agentcompact.evaluation.results import CellResult
from agentcompact.evaluation.statistics import paired_bootstrap
from agentcompact.evaluation.summary import named_alike
from agentcompact.settings import suggestion

ALL_TASKS = "all tasks"


class Comparison(BaseModel):
    """How much better a strategy answered than another at the same ratio.

    task: one, or "all tasks" for the questions of all. documents, questions: those that both answered. accuracy,
    other_accuracy: this one's and the other's. difference: their mean difference, low and high its 95 % interval.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    dtype: str
    task: str
    ratio: float
    strategy: str
    documents: int
    questions: int
    accuracy: float
    other_accuracy: float
    difference: float
    low: float
    high: float


Paired = list[tuple[list[float], list[float]]]
"""For each document the scores of one strategy and those of the other, of the same questions."""


def compare(cells: Sequence[CellResult], against: str) -> list[Comparison]:
    """Compare every strategy with the one labelled `against`, by task and over all tasks.

    Raises SettingsError where no result has that label.
    """
    every = [cell for cell in named_alike(cells) if cell.status == "ok" and cell.ratio is not None]
    labels = sorted({cell.strategy for cell in every})
    if against not in labels:
        raise SettingsError(
            f"no result is labelled '{against}'{suggestion(against, labels)}; there are: {', '.join(labels) or 'none'}"
        )
    others = {_place(cell): cell for cell in every if cell.strategy == against}
    paired: dict[tuple[str, str, str, float, str], Paired] = defaultdict(list)
    for cell in every:
        other = others.get(_place(cell))
        if cell.strategy == against or other is None or cell.ratio is None:
            continue
        scores = [
            (mine.score, its.score)
            for mine, its in zip(cell.questions, other.questions, strict=True)
            if mine.score is not None and its.score is not None
        ]
        if scores:
            pair = ([mine for mine, _ in scores], [its for _, its in scores])
            for task in (cell.task, ALL_TASKS):
                paired[cell.model, cell.dtype, task, cell.ratio, cell.strategy].append(pair)
    tasks = {(model, dtype): {t for m, d, t, _, _ in paired if (m, d) == (model, dtype)} for model, dtype, *_ in paired}
    return [
        _comparison(*key, paired[key])
        for key in sorted(paired, key=lambda key: (key[0], key[1], key[2] == ALL_TASKS, *key[2:]))
        if key[2] != ALL_TASKS or len(tasks[key[0], key[1]]) > 2  # of one task, that task says it
    ]


def _place(cell: CellResult) -> tuple[str, str, str, float | None, int, int]:
    return (cell.fingerprint, cell.dtype, cell.digest, cell.ratio, cell.compactions, cell.seed)


def _comparison(model: str, dtype: str, task: str, ratio: float, strategy: str, paired: Paired) -> Comparison:
    mine, its = [pair[0] for pair in paired], [pair[1] for pair in paired]
    difference, (low, high) = paired_bootstrap(mine, its)
    count = sum(map(len, mine))
    return Comparison(
        model=model,
        dtype=dtype,
        task=task,
        ratio=ratio,
        strategy=strategy,
        documents=len(paired),
        questions=count,
        accuracy=sum(map(sum, mine)) / count,
        other_accuracy=sum(map(sum, its)) / count,
        difference=difference,
        low=low,
        high=high,
    )
