"""The report as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len

from agentcompact.evaluation.report.columns import plain
from agentcompact.evaluation.report.content import Content, Grid, Section
from agentcompact.evaluation.report.drawing import Drawing

FROM_ELSEWHERE = {"strategy", "model", "task"}
KIND = re.compile(r"^(.*) \((\d+)\)$")


def markdown_text(content: Content, drawings: Sequence[Drawing] = (), images: str = "plots") -> str:
    """Write the report; images: the folder of the PNG files, relative to the report's own."""
    lines = ["# Evaluation results", "", "## What was run", ""]
    lines += [f"- {name}: {', '.join(map(code, values))}" for name, values in content.facts]
    if content.failures:
        lines += ["", f"**Cells that failed: {content.failed}**; see [Failures](#failures)."]
    for index, section in enumerate(content.sections):
        lines += ["", *_section(section, [d for d in drawings if d.section == index], images)]
    if content.comparison is not None:
        lines += ["", "## Comparison", "", f"{content.comparison.caption}:", "", *_table(content.comparison)]
    lines += ["", "## What the columns mean", ""]
    lines += [f"- **{name}**: {meaning}" for name, meaning in content.glossary]
    if content.failures:
        lines += ["", "## Failures", ""]
        lines += [f"- {code(name)}: {code(error)}" for name, error in content.failures]
    if content.warnings:
        lines += ["", "## Warnings", ""]
        lines += [f"- {code(text)} ({count} cells)" for text, count in content.warnings]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Write a text from elsewhere as a code span, where no character means anything."""
    line = plain(text)
    if not line:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if "`" in (line[0], line[-1]) else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _section(section: Section, drawings: Sequence[Drawing], images: str) -> list[str]:
    lines = [f"## {code(section.task)}: {code(section.model)} ({code(section.dtype)})", ""]
    for index, grid in enumerate(section.grids()):
        lines += [*([] if index == 0 else [f"{grid.caption}:", ""]), *_table(grid), ""]
    for drawing in drawings:
        lines += [f"![{_alt(drawing.alt)}]({images}/{drawing.name}.png)", ""]
    return lines[:-1]


def _alt(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>&!$|~])", r"\\\1", plain(text))


def _table(grid: Grid) -> list[str]:
    """Write a table whose source is aligned too."""
    titles = [_title(title) for title in grid.titles]
    lines = [
        [
            code(text).replace("|", "\\|") if title in FROM_ELSEWHERE else text
            for title, text in zip(grid.titles, line, strict=True)
        ]
        for line in grid.lines
    ]
    widths = [max(3, *(cell_len(line[index]) for line in [titles, *lines])) for index in range(len(titles))]

    def row(cells: Sequence[str]) -> str:
        padded = [
            " " * (width - cell_len(cell)) + cell if numeric else cell + " " * (width - cell_len(cell))
            for cell, width, numeric in zip(cells, widths, grid.numeric, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + ":" if numeric else "-" * width for width, numeric in zip(widths, grid.numeric, strict=True)
    ]
    return [row(titles), row(rule), *map(row, lines)]


def _title(title: str) -> str:
    """A kind's name is from elsewhere; the other titles are ours."""
    kind = KIND.match(title)
    return f"{code(kind[1])} ({kind[2]})".replace("|", "\\|") if kind else title
