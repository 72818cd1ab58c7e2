"""How many entries each layer and head got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcompact.evaluation.report.columns import times
from agentcompact.evaluation.report.content import Section
from agentcompact.evaluation.report.drawing import COLOURS, MARKERS, folded, legend, new_figure
from agentcompact.evaluation.results import CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAPS_A_LINE = 3
Budget = np.ndarray[Any, np.dtype[np.float64]]


def budget_figure(section: Section, cells: Sequence[CellResult], palette: dict[str, int]) -> tuple[str, Figure] | None:
    """Draw the mean entries of each layer and head at the middle ratio and the greatest length.

    Strategies that treat all heads of a layer alike are lines in one panel, the others a map each.
    """
    ratios = sorted({row.ratio for row in section.rows if row.ratio is not None and row.documents})
    if not ratios:
        return None
    ratio = ratios[len(ratios) // 2]
    budgets = _budgets(section, cells, ratio)
    alike = {name: budget for name, budget in budgets.items() if (budget == budget[:, :1]).all()}
    maps = {name: budget for name, budget in budgets.items() if name not in alike}
    panels = len(maps) + bool(alike)
    if not panels:
        return None
    across = min(MAPS_A_LINE, panels)
    down = math.ceil(panels / across)
    figure = new_figure(f"{section.title}, {times(ratio)}", max(6.4, 3.6 * across), 0.7 + 3.0 * down)
    axes: list[Axes] = list(figure.subplots(down, across, squeeze=False).flat)
    for empty in axes[panels:]:
        empty.set_visible(False)
    if alike:
        _draw_lines(figure, axes[0], alike, palette)
    _draw_maps(figure, axes[bool(alike) : panels], maps)
    return f"Entries of each layer and head at {times(ratio)}", figure


def _budgets(section: Section, cells: Sequence[CellResult], ratio: float) -> dict[str, Budget]:
    """The mean over documents for each strategy; documents are left out whose layers or heads differ from the first."""
    chosen: dict[str, list[Budget]] = {}
    place = (section.model, section.dtype, section.task, ratio)
    own = [c for c in cells if (c.model, c.dtype, c.task, c.ratio) == place and c.status == "ok" and c.entries_per_head]
    own = [cell for cell in own if cell.compactions == min(each.compactions for each in own)]
    longest = max((cell.length or 0 for cell in own), default=0)
    for cell in own:
        rows = cell.entries_per_head or []
        if (cell.length or 0) == longest and rows[0] and len({len(row) for row in rows}) == 1:
            chosen.setdefault(cell.strategy, []).append(np.array(rows, dtype=np.float64))
    return {
        name: np.mean([budget for budget in found if budget.shape == found[0].shape], axis=0)
        for name, found in sorted(chosen.items())
    }


def _draw_lines(figure: Figure, axis: Axes, alike: dict[str, Budget], palette: dict[str, int]) -> None:
    from matplotlib.ticker import MaxNLocator

    handles: list[Any] = []
    for place, (name, budget) in enumerate(alike.items()):
        number = palette[name]
        handles += axis.plot(
            budget[:, 0],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            linewidth=1.4 + 2.2 * (len(alike) - 1 - place),  # lines upon each other all stay visible
            alpha=0.85,
        )
    axis.set_title("all heads of a layer alike")
    axis.set_xlabel("layer")
    axis.set_ylabel("entries a head")
    axis.set_ylim(0, max(float(budget.max()) for budget in alike.values()) * 1.15 + 1)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, handles, list(alike))


def _draw_maps(figure: Figure, axes: Sequence[Axes], maps: dict[str, Budget]) -> None:
    from matplotlib.ticker import MaxNLocator

    if not maps:
        return
    most = max(float(budget.max()) for budget in maps.values())
    image: Any = None
    for axis, (name, budget) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(
            budget, aspect="auto", cmap="cividis", vmin=0, vmax=most, interpolation="nearest", origin="lower"
        )
        axis.grid(False)
        axis.set_title("\n".join(folded(name, 34)), parse_math=False)
        axis.set_xlabel("KV head")
        axis.set_ylabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=list(axes), label="entries")
