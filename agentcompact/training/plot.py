"""The plot of a training run's losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentcompact.files import atomic_output

SMOOTHED = 20
"""Updates that the training loss is averaged over in the plot."""


def plot_losses(log: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw training and held-out loss over the updates as a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for phase in ("attention", "continuation"):
        entries = [entry for entry in log if entry["phase"] == phase]
        if not entries:
            continue
        name = "attention outputs, relative error" if phase == "attention" else "continuations, KL / no-context KL"
        losses = [entry["loss"] for entry in entries]
        smooth = [
            sum(losses[max(0, i + 1 - SMOOTHED) : i + 1]) / len(losses[max(0, i + 1 - SMOOTHED) : i + 1])
            for i in range(len(losses))
        ]
        axes.plot([entry["update"] for entry in entries], smooth, label=f"training: {name}")
    for key, name in (("held_out_attention", "attention outputs"), ("held_out", "continuations")):
        held = [entry for entry in log if entry.get(key) is not None]
        if held:
            axes.plot(
                [entry["update"] for entry in held],
                [entry[key] for entry in held],
                "o-",
                ms=3,
                label=f"held-out: {name}",
            )
    axes.set(xlabel="updates", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_output(path, overwrite=True, private=False) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
    return True
