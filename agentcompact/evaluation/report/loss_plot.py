"""How the losses of strategies fell that train their entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcompact.evaluation.report.columns import times
from agentcompact.evaluation.report.content import Section
from agentcompact.evaluation.report.drawing import COLOURS, DASHES, label_logarithmic, legend, new_figure
from agentcompact.evaluation.results import CellResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = np.ndarray[Any, np.dtype[np.float64]]


def loss_figure(section: Section, cells: Sequence[CellResult], palette: dict[str, int]) -> tuple[str, Figure] | None:
    """Draw the loss of each stage against its updates: thin lines for documents, thick ones for their mean.

    One panel a stage, since stages have different losses. None where no strategy of the section trained.
    """
    place = (section.model, section.dtype, section.task)
    own = [cell for cell in cells if (cell.model, cell.dtype, cell.task) == place and cell.training.get("losses")]
    stages = sorted({stage for cell in own for stage in cell.training["losses"]})
    if not stages:
        return None
    figure = new_figure(section.title, max(6.4, 4.2 * len(stages)), 3.9)
    handles: dict[str, Any] = {}
    names = sorted({(cell.strategy, cell.ratio or 0.0) for cell in own})
    ratios = sorted({ratio for _, ratio in names})
    for axis, stage in zip(figure.subplots(1, len(stages), squeeze=False).flat, stages, strict=True):
        for name, ratio in names:
            curves = _curves(own, name, ratio, stage)
            style = {
                "color": COLOURS[palette[name] % len(COLOURS)],
                "linestyle": DASHES[ratios.index(ratio) % len(DASHES)],
            }
            for updates, losses in curves if len(curves) > 1 else []:
                axis.plot(updates, losses, linewidth=0.6, alpha=0.35, **style)
            alike = [losses for _, losses in curves if len(losses) == len(curves[0][1])]
            if alike:
                (handles[f"{name}, {times(ratio)}"],) = axis.plot(
                    curves[0][0], np.mean(alike, axis=0), linewidth=1.8, **style
                )
        axis.set_title(stage)
        axis.set_xlabel("updates")
        axis.set_ylabel("loss")
        axis.set_yscale("log")
        label_logarithmic(axis.yaxis, "{:.4g}".format)
    legend(figure, list(handles.values()), list(handles))
    return "Losses of training", figure


def _curves(cells: Sequence[CellResult], name: str, ratio: float, stage: str) -> list[tuple[Curve, Curve]]:
    """Return updates and losses of each document; a point is the mean of as many updates as lie around it."""
    found = []
    for cell in cells:
        losses = cell.training["losses"].get(stage, [])
        if (cell.strategy, cell.ratio or 0.0) == (name, ratio) and losses:
            updates = cell.training.get(f"{stage.replace(' ', '')}_updates", len(losses))
            middle = (np.arange(len(losses)) + 0.5) * updates / len(losses)
            found.append((middle, np.array(losses, dtype=np.float64)))
    return found
