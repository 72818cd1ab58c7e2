"""What a report says, before it is laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentcompact.evaluation.comparison import Comparison, compare
from agentcompact.evaluation.report.columns import (
    COMPACTIONS,
    LENGTH,
    MISSING,
    RATIO,
    STRATEGY,
    Column,
    glossary,
    percent,
    plain,
    shown,
    times,
)
from agentcompact.evaluation.results import FULL, NO_CONTEXT, CellResult
from agentcompact.evaluation.summary import SummaryRow, named_alike, summarise

KIND_SCORES = ("accuracy", "choice_accuracy")
WARNINGS_SHOWN = 12


@dataclass(frozen=True)
class Grid:
    """A table as texts; `numeric` says which columns are right-aligned, `breaks` before which rows a length begins."""

    caption: str
    titles: list[str]
    numeric: list[bool]
    lines: list[list[str]]
    failed: list[bool]
    breaks: list[bool]


@dataclass(frozen=True)
class Section:
    """The rows of one model and task."""

    model: str
    dtype: str
    task: str
    rows: list[SummaryRow]

    @property
    def title(self) -> str:
        """Name the section in one line."""
        return f"{plain(self.task)}: {plain(self.model)} ({plain(self.dtype)})"

    def grids(self) -> list[Grid]:
        """Give the main table and one by kind of question for each way of scoring."""
        main = _grid("All measures", self.rows, shown(self.rows))
        return [main, *(by_kind(self.rows, score) for score in kind_scores(self.rows))]


@dataclass(frozen=True)
class Content:
    """All of a report but its figures."""

    facts: list[tuple[str, list[str]]]
    sections: list[Section]
    glossary: list[tuple[str, str]]
    failed: int
    failures: list[tuple[str, str]]
    warnings: list[tuple[str, int]]
    rows: list[SummaryRow]
    cells: list[CellResult]
    comparison: Grid | None = None


def build(cells: Sequence[CellResult], against: str | None = None) -> Content:
    """Gather what is to be said about these cells; against: the strategy that the others are compared with."""
    current = named_alike(cells)
    rows = summarise(current)
    counted = Counter(plain(warning) for cell in current for warning in cell.warnings)
    return Content(
        facts=_facts(current),
        sections=sections(rows),
        glossary=glossary(rows),
        failed=sum(cell.status == "failed" for cell in current),
        failures=_failures(current),
        warnings=sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:WARNINGS_SHOWN],
        rows=rows,
        cells=current,
        comparison=None if against is None else comparison_grid(compare(cells, against), against),
    )


def comparison_grid(comparisons: Sequence[Comparison], against: str) -> Grid:
    """Make the table of strategies against one of them."""
    titles = ["model", "task", "ratio", "strategy", "documents", "questions", "accuracy %", "the other's", "difference"]
    lines = [
        [
            plain(f"{each.model} ({each.dtype})"),
            plain(each.task),
            times(each.ratio),
            plain(each.strategy),
            str(each.documents),
            str(each.questions),
            percent(each.accuracy),
            percent(each.other_accuracy),
            f"{100 * each.difference:+.1f} ({100 * each.low:+.1f} to {100 * each.high:+.1f})",
        ]
        for each in comparisons
    ]
    places = [(each.model, each.task) for each in comparisons]
    return Grid(
        caption=f"Against {plain(against)}: mean difference in accuracy on the same questions, with its 95 % interval "
        "by a paired bootstrap (documents drawn, then questions within them)",
        titles=titles,
        numeric=[title not in ("model", "task", "strategy") for title in titles],
        lines=lines,
        failed=[False] * len(lines),
        breaks=[index > 0 and place != places[index - 1] for index, place in enumerate(places)],
    )


def sections(rows: Sequence[SummaryRow]) -> list[Section]:
    """Part rows by model and task; they are in order already."""
    groups = groupby(rows, key=lambda row: (row.model, row.dtype, row.task))
    return [Section(*key, rows=list(group)) for key, group in groups]


def row_name(row: SummaryRow) -> str:
    """Name a row within its section."""
    length = f", length {row.length:,}" if row.length is not None else ""
    ratio = f" at {times(row.ratio)}" if row.ratio is not None else ""
    times_compacted = f", compacted {row.compactions} times" if row.compactions > 1 else ""
    return f"{plain(row.strategy)}{ratio}{length}{times_compacted}"


def kind_scores(rows: Sequence[SummaryRow]) -> list[str]:
    """Say which ways of scoring some kind of question has."""
    return [
        score
        for score in KIND_SCORES
        if any(getattr(kind, score) is not None for row in rows for kind in row.kinds.values())
    ]


def by_kind(rows: Sequence[SummaryRow], score: str) -> Grid:
    """Make the table of one way of scoring by kind of question."""
    columns = [column for column in shown(rows) if column in (LENGTH, COMPACTIONS, STRATEGY, RATIO)]
    columns += [
        _kind_column(kind, score, rows)
        for kind in sorted({kind for row in rows for kind in row.kinds})
        if any(getattr(row.kinds[kind], score) is not None for row in rows if kind in row.kinds)
    ]
    return _grid(f"{'Accuracy' if score == 'accuracy' else 'Choices'} by kind of question, %", rows, columns)


def _kind_column(kind: str, score: str, rows: Sequence[SummaryRow]) -> Column:
    def text(row: SummaryRow) -> str:
        return percent(getattr(row.kinds[kind], score)) if kind in row.kinds else MISSING

    counted = "questions" if score == "accuracy" else "choices"
    asked = max(getattr(row.kinds[kind], counted) for row in rows if kind in row.kinds)
    return Column(f"{plain(kind) or 'other'} ({asked})", text)


def _grid(caption: str, rows: Sequence[SummaryRow], columns: Sequence[Column]) -> Grid:
    return Grid(
        caption=caption,
        titles=[column.title for column in columns],
        numeric=[column.numeric for column in columns],
        lines=[[column.text(row) for column in columns] for row in rows],
        failed=[row.failed > 0 for row in rows],
        breaks=[index > 0 and _place(row) != _place(rows[index - 1]) for index, row in enumerate(rows)],
    )


def _place(row: SummaryRow) -> tuple[int | None, int]:
    return row.length, row.compactions


def _failures(cells: Sequence[CellResult]) -> list[tuple[str, str]]:
    """Name the cells that failed, those of one row with the same error together."""
    documents: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.status == "failed":
            ratio = f" at {times(cell.ratio)}" if cell.ratio is not None else ""
            length = f", length {cell.length:,}" if cell.length is not None else ""
            name = plain(f"{cell.task}, {cell.model} ({cell.dtype}), {cell.strategy}{ratio}{length}")
            seed = f" (seed {cell.seed})" if cell.seed else ""
            documents.setdefault((name, plain(cell.error or "no reason given")), []).append(f"{cell.document}{seed}")
    return [(plain(f"{name}: {', '.join(found)}"), error) for (name, error), found in sorted(documents.items())]


def _unique(values: Iterable[str]) -> list[str]:
    return sorted({plain(value) for value in values})


def _facts(cells: Sequence[CellResult]) -> list[tuple[str, list[str]]]:
    strategies = _unique(cell.strategy for cell in cells if cell.strategy not in (FULL, NO_CONTEXT))
    ratios = sorted({cell.ratio for cell in cells if cell.ratio is not None})
    facts = [
        ("models", _unique(f"{cell.model} ({cell.dtype}, {cell.fingerprint[:12]})" for cell in cells)),
        ("tasks", [_task(task, cells) for task in sorted({cell.task for cell in cells})]),
        ("strategies", strategies),
        ("ratios", [times(ratio) for ratio in ratios]),
        ("seeds", [str(seed) for seed in sorted({cell.seed for cell in cells})]),
        ("versions", _unique(f"{name} {version}" for cell in cells for name, version in cell.versions.items())),
        ("cells", [f"{len(cells):,}", f"{sum(cell.status == 'failed' for cell in cells):,} failed"]),
    ]
    return [(name, values) for name, values in facts if values]


def _task(task: str, cells: Sequence[CellResult]) -> str:
    own = {cell.digest: cell for cell in cells if cell.task == task}
    questions: dict[str, int] = {}
    for cell in cells:
        if cell.task == task:
            questions[cell.digest] = max(questions.get(cell.digest, 0), len(cell.questions))
    tokens = [cell.tokens for cell in cells if cell.task == task]
    low, high = min(tokens), max(tokens)
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return plain(f"{task}: documents {len(own)}, questions {sum(questions.values())}, tokens {span}")
