"""The figures of a report: accuracy against ratio and against time, and budgets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcompact.evaluation.report.budget_plot import budget_figure
from agentcompact.evaluation.report.columns import plain, times
from agentcompact.evaluation.report.content import Content, Section
from agentcompact.evaluation.report.drawing import (
    COLOURS,
    DASHES,
    INK,
    MARKERS,
    Drawing,
    drawing_style,
    label_logarithmic,
    legend,
    new_figure,
    settle,
)
from agentcompact.evaluation.report.loss_plot import loss_figure
from agentcompact.evaluation.results import FULL, NO_CONTEXT
from agentcompact.evaluation.summary import SummaryRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_A_LINE = 3
DODGE = 0.05
REFERENCES = {FULL: ("full cache", "--"), NO_CONTEXT: ("no context", ":")}


@dataclass(frozen=True)
class Panel:
    """One pair of axes: one way of scoring at one length."""

    title: str
    field: str
    low: str
    high: str
    scale: float
    rows: list[SummaryRow]

    def score(self, row: SummaryRow) -> tuple[float, float, float]:
        """Give a row's score, in per cent where it is a share, and how far the interval goes below and above."""
        value, low, high = (self.scale * (getattr(row, name) or 0.0) for name in (self.field, self.low, self.high))
        return value, max(0.0, value - low), max(0.0, high - value)


PERCENT = 100.0
SCORES = (
    ("accuracy", "accuracy", "accuracy_low", "accuracy_high", PERCENT),
    ("choices", "choice_accuracy", "choice_low", "choice_high", PERCENT),
)
KL = ("KL divergence", "kl", "kl", "kl", 1.0)
"""What is drawn where no question was scored; it has no interval."""


def draw_all(content: Content) -> list[Drawing]:
    """Draw the figures of every section. Raises InputError where matplotlib is not installed."""
    palette = _palette(content.rows)
    drawings: list[Drawing] = []
    for index, section in enumerate(content.sections):
        slug = _slug(f"{section.task}-{section.model}-{section.dtype}")
        for kind, draw in FIGURES:
            name = f"{index + 1:02d}-{slug}-{kind}"
            with drawing_style(name):
                made = draw(section, content, palette)
                if made is None:
                    continue
                title, figure = made
                settle(figure)
            alt = f"{title}, {section.title}. The numbers are in the table."
            drawings.append(Drawing(name, title, alt, index, figure))
    return drawings


def _palette(rows: Sequence[SummaryRow]) -> dict[str, int]:
    """Number the strategies, alike in all figures."""
    names = sorted({row.strategy for row in rows} - {FULL, NO_CONTEXT})
    return {name: index for index, name in enumerate(names)}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-")


def _panels(rows: Sequence[SummaryRow]) -> list[Panel]:
    return _panels_of(rows, SCORES) or _panels_of(rows, (KL,))


def _once(section: Section) -> list[SummaryRow]:
    """The rows with the fewest compactions; the others have a figure of their own."""
    fewest = min(row.compactions for row in section.rows)
    return [row for row in section.rows if row.compactions == fewest]


def _panels_of(every: Sequence[SummaryRow], scores: Sequence[tuple[str, str, str, str, float]]) -> list[Panel]:
    lengths = sorted({row.length for row in every}, key=lambda length: -1 if length is None else length)
    panels = []
    for title, field, low, high, scale in scores:
        for length in lengths:
            rows = [r for r in every if r.length == length and getattr(r, field) is not None]
            if any(row.ratio is not None for row in rows):
                name = title if length is None else f"{title}, length {length:,}"
                panels.append(Panel(name, field, low, high, scale, rows))
    return panels


def _measure(panels: Sequence[Panel]) -> str:
    return "Score" if panels[0].scale == PERCENT else "KL divergence"


def _axes(title: str, panels: Sequence[Panel]) -> tuple[Figure, list[Axes]]:
    across = min(PANELS_A_LINE, len(panels))
    down = math.ceil(len(panels) / across)
    figure = new_figure(title, max(6.4, 3.6 * across), 0.7 + 3.0 * down)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    axes: list[Axes] = list(grid.flat)
    for empty in axes[len(panels) :]:
        empty.set_visible(False)
    tops: list[float] = []
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_title(panel.title)
        scores = [panel.score(row) for row in panel.rows]
        tops.append(max(value + above for value, _, above in scores))
    limit = 1.08 * max(tops) + 0.02 * panels[0].scale
    axes[0].set_ylim(0, min(limit, 103.0) if panels[0].scale == PERCENT else limit)
    for line in grid:
        line[0].set_ylabel("score, %" if panels[0].scale == PERCENT else "nats")
    return figure, axes[: len(panels)]


def _lines(rows: Sequence[SummaryRow]) -> dict[str, list[SummaryRow]]:
    """The rows of each strategy that has ratios."""
    names = sorted({row.strategy for row in rows if row.ratio is not None})
    return {name: [row for row in rows if row.strategy == name and row.ratio is not None] for name in names}


def _references(axis: Axes, panel: Panel, seen: dict[str, Any]) -> None:
    for row in panel.rows:
        if row.strategy in REFERENCES:
            label, dashes = REFERENCES[row.strategy]
            seen[label] = axis.axhline(panel.score(row)[0], color=INK, linestyle=dashes, linewidth=1.2)


def _ratio_figure(section: Section, _: Content, palette: dict[str, int]) -> tuple[str, Figure] | None:
    panels = _panels(_once(section))
    if not panels:
        return None
    figure, axes = _axes(section.title, panels)
    handles: dict[str, Any] = {}
    references: dict[str, Any] = {}
    ratios = sorted({row.ratio for row in section.rows if row.ratio is not None})
    for axis, panel in zip(axes, panels, strict=True):
        _references(axis, panel, references)
        lines = _lines(panel.rows)
        for place, (name, rows) in enumerate(lines.items()):
            shift = 2 ** (DODGE * (place - (len(lines) - 1) / 2))  # error bars side by side, not upon each other
            scores = [panel.score(row) for row in rows]
            number = palette[name]
            handles[name] = axis.errorbar(
                [(row.ratio or 1.0) * shift for row in rows],
                [score[0] for score in scores],
                yerr=[[score[1] for score in scores], [score[2] for score in scores]],
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
                markersize=5,
                capsize=2,
                elinewidth=1,
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(ratios, labels=[times(ratio) for ratio in ratios])
        axis.minorticks_off()
        if len(ratios) == 1:  # what is side by side at one ratio must not look like several
            axis.set_xlim(ratios[0] / 2, ratios[0] * 2)
        axis.set_xlabel("compaction ratio")
    _joined_legend(figure, handles, references)
    intervals = ", with 95 % intervals" if panels[0].scale == PERCENT else ""
    return f"{_measure(panels)} against ratio{intervals}", figure


def _time_figure(section: Section, _: Content, palette: dict[str, int]) -> tuple[str, Figure] | None:
    panels = [
        p for p in _panels(_once(section)) if any(r.ratio and r.compaction_per_prefill is not None for r in p.rows)
    ]
    if not panels:
        return None
    figure, axes = _axes(section.title, panels)
    ratios = sorted({row.ratio for row in section.rows if row.ratio is not None})
    handles: dict[str, Any] = {}
    references: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        _references(axis, panel, references)
        points = [row for row in panel.rows if row.ratio is not None and row.compaction_per_prefill is not None]
        for row in points:
            marker = MARKERS[ratios.index(row.ratio or 0.0) % len(MARKERS)]
            colour = COLOURS[palette[row.strategy] % len(COLOURS)]
            axis.scatter(
                row.compaction_per_prefill or 0.0,
                panel.score(row)[0],
                s=48,
                color=colour,
                marker=marker,
                edgecolors="white",
                linewidths=0.6,
                clip_on=False,
                zorder=3,
            )
            handles[row.strategy] = _key("s", colour)
        taken = [row.compaction_per_prefill or 0.0 for row in points]
        if min(taken) > 0 and max(taken) > 20 * min(taken):
            axis.set_xscale("log")
            label_logarithmic(axis.xaxis, times)
        else:
            axis.set_xlim(left=0)
        axis.set_xlabel("compaction, multiple of prefill")
    shapes = {times(ratio): _key(MARKERS[i % len(MARKERS)], INK) for i, ratio in enumerate(ratios)}
    _joined_legend(figure, handles, {**shapes, **references})
    return f"{_measure(panels)} against compaction time", figure


def _key(marker: str, colour: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="", marker=marker, color=colour)


def _rounds_figure(section: Section, _: Content, palette: dict[str, int]) -> tuple[str, Figure] | None:
    """One panel a ratio and way of scoring, one line a strategy, over the number of compactions."""
    if len({row.compactions for row in section.rows}) < 2:
        return None
    ratios = sorted({row.ratio for row in section.rows if row.ratio is not None})
    references = [row for row in section.rows if row.ratio is None]
    panels = [
        Panel(f"{panel.title}, {times(ratio)}", panel.field, panel.low, panel.high, panel.scale, panel.rows)
        for ratio in ratios
        for panel in _panels([*references, *(row for row in section.rows if row.ratio == ratio)])
    ]
    if not panels:
        return None
    figure, axes = _axes(section.title, panels)
    handles: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        for name, (label, dashes) in REFERENCES.items():
            rows = [row for row in panel.rows if row.strategy == name]
            if len(rows) > 1:
                points = [panel.score(row)[0] for row in rows]
                (drawn[label],) = axis.plot(
                    [row.compactions for row in rows], points, color=INK, linestyle=dashes, linewidth=1.2
                )
            elif rows:
                drawn[label] = axis.axhline(panel.score(rows[0])[0], color=INK, linestyle=dashes, linewidth=1.2)
        for name, rows in _lines(panel.rows).items():
            number = palette[name]
            (handles[name],) = axis.plot(
                [row.compactions for row in rows],
                [panel.score(row)[0] for row in rows],
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
                markersize=5,
            )
        axis.set_xticks(sorted({row.compactions for row in panel.rows}))
        axis.set_xlabel("compactions in a row")
    _joined_legend(figure, handles, drawn)
    return f"{_measure(panels)} against the number of compactions", figure


def _joined_legend(figure: Figure, strategies: dict[str, Any], others: dict[str, Any]) -> None:
    names = [plain(name) for name in sorted(strategies)]
    legend(figure, [*(strategies[name] for name in sorted(strategies)), *others.values()], [*names, *others])


def _budget_figure(section: Section, content: Content, palette: dict[str, int]) -> tuple[str, Figure] | None:
    return budget_figure(section, content.cells, palette)


def _loss_figure(section: Section, content: Content, palette: dict[str, int]) -> tuple[str, Figure] | None:
    return loss_figure(section, content.cells, palette)


Draw = Callable[[Section, Content, "dict[str, int]"], "tuple[str, Figure] | None"]
FIGURES: tuple[tuple[str, Draw], ...] = (
    ("ratio", _ratio_figure),
    ("time", _time_figure),
    ("rounds", _rounds_figure),
    ("budgets", _budget_figure),
    ("losses", _loss_figure),
)
