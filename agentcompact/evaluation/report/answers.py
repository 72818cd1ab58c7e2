"""What was answered: the first questions of a section, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from agentcompact.evaluation.report.columns import plain, times
from agentcompact.evaluation.report.content import Grid, Section
from agentcompact.evaluation.results import FULL, CellResult, QuestionResult

SHOWN = 24
"""Questions shown of a section."""
LONGEST = 120
"""Characters shown of a text."""


def answer_grid(section: Section, cells: Sequence[CellResult]) -> Grid | None:
    """Make a table of questions with the full cache's answer and each strategy's at the middle ratio.

    None where no result says what was asked, as those of older versions.
    """
    place = (section.model, section.dtype, section.task)
    own = [cell for cell in cells if (cell.model, cell.dtype, cell.task) == place and cell.status == "ok"]
    ratios = sorted({cell.ratio for cell in own if cell.ratio is not None})
    middle = ratios[len(ratios) // 2] if ratios else None
    shown = [cell for cell in own if cell.strategy == FULL or cell.ratio == middle]
    fewest = min((cell.compactions for cell in shown), default=1)
    by_document: dict[str, dict[str, CellResult]] = {}
    for cell in shown:
        if cell.compactions == fewest and middle is not None:
            by_document.setdefault(cell.digest, {})[cell.strategy] = cell
    full = [found for found in by_document.values() if FULL in found]
    names = sorted({name for found in full for name in found if name != FULL})
    lines = [
        [
            _cut(question.question),
            _cut(" or ".join(question.expected)),
            *(_answer(found.get(name), index) for name in (FULL, *names)),
        ]
        for found in full
        for index, question in enumerate(found[FULL].questions)
        if question.question
    ][:SHOWN]
    if not lines or middle is None:
        return None
    return Grid(
        caption=f"What was answered at {times(middle)}: the first {len(lines)} questions",
        titles=["question", "expected", FULL, *(plain(name) for name in names)],
        numeric=[False] * (3 + len(names)),
        lines=lines,
        failed=[False] * len(lines),
        breaks=[False] * len(lines),
    )


def _answer(cell: CellResult | None, index: int) -> str:
    if cell is None or index >= len(cell.questions):
        return ""
    result = cell.questions[index]
    return f"{_mark(result)} {_cut(result.answer)}".strip()


def _mark(result: QuestionResult) -> str:
    if result.score is None:
        return ""
    return "✓" if result.score == 1 else "✗" if result.score == 0 else f"{result.score:.0%}"


def _cut(text: str) -> str:
    line = plain(text)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
