"""The summary in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentcompact.evaluation.report.columns import MISSING, STATUS, STRATEGY, Column, plain, shown
from agentcompact.evaluation.report.content import Grid, Section, by_kind, kind_scores, row_name, sections
from agentcompact.evaluation.results import FULL, NO_CONTEXT
from agentcompact.evaluation.summary import SummaryRow

GAP = 2
NAME_WIDTHS = (16, 30)


def terminal_tables(rows: Sequence[SummaryRow], width: int = 80) -> list[RenderableType]:
    """Make the tables of each model and task, with as many columns as fit into `width`."""
    return [_section(section, width) for section in sections(rows)]


def comparison_table(grid: Grid) -> RenderableType:
    """Show the table of strategies against one of them."""
    return _kind_table(grid, range(len(grid.titles)))


def _section(section: Section, width: int) -> RenderableType:
    parts: list[RenderableType] = []
    columns = [column for column in shown(section.rows) if column.rank is not None]
    if all(row.accuracy is None for row in section.rows):
        columns = [_promoted(column) for column in columns]
    columns, dropped = _fitting(columns, section.rows, width)
    parts.append(_table(section, columns))
    if dropped:
        names = ", ".join(column.title for column in dropped)
        parts.append(Text(f"  without {names}: too narrow here, see the files", style="dim"))
    parts += [
        Text(f"  [{index}] {row_name(row)}: {row.failed} failed, {plain(row.error or '')}", style="red")
        for index, row in enumerate((row for row in section.rows if row.failed), 1)
    ]
    scores = kind_scores(section.rows)
    if scores:
        parts.append(Text())
        parts += _kind_tables(by_kind(section.rows, scores[0]), width)
    parts.append(Text())
    return Group(*parts)


def _promoted(column: Column) -> Column:
    """Let choices take the place of answers, where only they were scored."""
    rank = {"choices %": 1, "choice utility": 2}.get(column.title, column.rank)
    return replace(column, rank=rank)


def _name_width(width: int) -> int:
    """How much of a terminal the strategies' names may take before they are folded."""
    narrowest, widest = NAME_WIDTHS
    return min(widest, max(narrowest, width // 4 + 4))


def _brief(column: Column, row: SummaryRow) -> str:
    return (column.brief or column.text)(row)


def _heading(title: str) -> str:
    """Break a title of several words, so that its column can be narrow."""
    return title.replace(" ", "\n")


def _width(column: Column, rows: Sequence[SummaryRow], name_width: int) -> int:
    heading = max(cell_len(line) for line in _heading(column.title).split("\n"))
    widest = max(heading, *(cell_len(_brief(column, row)) for row in rows))
    if column.title == STATUS.title:
        return widest + 5  # the footnote's mark
    return min(widest, name_width) if column.title == STRATEGY.title else widest


def _fitting(columns: list[Column], rows: Sequence[SummaryRow], width: int) -> tuple[list[Column], list[Column]]:
    """Drop columns by rank until the rest fits; those of rank 0 stay whatever happens."""
    kept = list(columns)
    while sum(_width(column, rows, _name_width(width)) + GAP for column in kept) - GAP > width:
        last = max(kept, key=lambda column: column.rank or 0)
        if not last.rank:
            break
        kept.remove(last)
    return kept, [column for column in columns if column not in kept]


def _style(row: SummaryRow) -> str:
    return "dim" if row.strategy in (FULL, NO_CONTEXT) else ""


def _table(section: Section, columns: Sequence[Column]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=Text(section.title, style="bold"),
        title_justify="left",
    )
    for column in columns:
        table.add_column(
            Text(_heading(column.title)),
            justify="right" if column.numeric else "left",
            no_wrap=column.title != STRATEGY.title,
            overflow="fold",
            vertical="top",
        )
    mark = 0
    for index, row in enumerate(section.rows):
        if index and row.length != section.rows[index - 1].length:
            table.add_section()
        mark += row.failed > 0
        texts = [Text(_brief(column, row)) for column in columns]
        for column, text in zip(columns, texts, strict=True):
            if text.plain == MISSING:
                text.stylize("dim")
            if column.title == STATUS.title and row.failed:
                text.append(f" [{mark}]")
                text.stylize("red")
        table.add_row(*texts, style=_style(row))
    return table


def _kind_tables(grid: Grid, width: int) -> list[RenderableType]:
    """Show a table by kind, in several where the kinds do not fit side by side."""
    fixed = sum(not _is_kind(title) for title in grid.titles)
    headings = [_kind_heading(title) for title in grid.titles]
    sizes = [
        GAP
        + max(
            cell_len(part)
            for text in (headings[index], *(line[index] for line in grid.lines))
            for part in text.split("\n")
        )
        for index in range(len(grid.titles))
    ]
    sizes[:fixed] = [min(size, _name_width(width) + GAP) for size in sizes[:fixed]]
    parts: list[list[int]] = [[]]
    for index in range(fixed, len(grid.titles)):
        if parts[-1] and sum(sizes[:fixed]) + sum(sizes[i] for i in parts[-1]) + sizes[index] - GAP > width:
            parts.append([])
        parts[-1].append(index)
    return [_kind_table(grid, [*range(fixed), *part]) for part in parts]


def _is_kind(title: str) -> bool:
    return title.endswith(")")


def _kind_heading(title: str) -> str:
    """Put the number of questions below the kind's name."""
    return title.replace(" (", "\n(") if _is_kind(title) else title


def _kind_table(grid: Grid, indices: Sequence[int]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=Text(grid.caption, style="italic"),
        title_justify="left",
    )
    for index in indices:
        table.add_column(
            Text(_kind_heading(grid.titles[index])), justify="right" if grid.numeric[index] else "left", overflow="fold"
        )
    for line, begins in zip(grid.lines, grid.breaks, strict=True):
        if begins:
            table.add_section()
        table.add_row(*(Text(line[index], style="dim" if line[index] == MISSING else "") for index in indices))
    return table
