"""Checkpoints of a training run: the writer, the optimiser's state and where the run is, in one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentcompact.cache.digest import tensors_digest
from agentcompact.errors import TrainingError
from agentcompact.files import atomic_output
from agentcompact.writers import FastDiamond

FILE_NAME = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    path: Path, writer: FastDiamond, optimiser: torch.optim.Optimizer, update: int, facts: dict[str, Any]
) -> None:
    """Write a checkpoint after `update` updates. facts: what a run that resumes from it must be alike in."""
    tensors = {f"writer.{name}": tensor.detach().cpu() for name, tensor in writer.named_parameters()}
    for name, parameter in writer.named_parameters():
        for moment in MOMENTS:
            if moment in optimiser.state.get(parameter, {}):
                tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment].cpu()
    steps = [int(state["step"]) for state in optimiser.state.values()]
    text = json.dumps({"update": update, "steps": max(steps, default=0), **facts}, sort_keys=True)
    with atomic_output(path, overwrite=True, private=False) as temporary:
        save_file(tensors, temporary, {"agentcompact_training": text, "digest": tensors_digest(text, tensors)})


def load_checkpoint(path: Path, writer: FastDiamond, optimiser: torch.optim.Optimizer, facts: dict[str, Any]) -> int:
    """Put writer and optimiser to where a checkpoint was written; return the number of updates done.

    Raises TrainingError where it is damaged, or was begun with other settings, another model or corpus.
    """
    kept, tensors = _read(path)
    for name in sorted(facts):
        if kept.get(name) != facts[name]:
            raise TrainingError(
                f"{path.parent} holds a run with {_difference(name, kept.get(name), facts[name])}: "
                "give the same again to resume it, or another --output"
            )
    _restore(kept, tensors, writer, optimiser)
    return int(kept["update"])


def take_over(path: Path, writer: FastDiamond, optimiser: torch.optim.Optimizer, facts: dict[str, Any]) -> bool:
    """Begin with the numbers and the moments of another run's checkpoint, where its last loss was on continuations.

    The checkpoint keeps more digits than the writer's file, and the moments spare the first updates from being wild.
    Returns whether it was done. Raises TrainingError where the file is damaged, or of another model or writer.
    """
    kept, tensors = _read(path)
    if kept["model"] != facts["model"] or kept["settings"]["writer"] != facts["settings"]["writer"]:
        raise TrainingError(f"{path} is of another model or writer than the file beside it: begin with that file")
    if int(kept["update"]) <= kept["settings"]["attention_updates"]:
        return False
    _restore(kept, tensors, writer, optimiser)
    return True


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint's facts and tensors."""
    damaged = TrainingError(f"{path} is damaged: remove the folder and train anew")
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise damaged from error
    text = stored.get("agentcompact_training", "")
    if not text or tensors_digest(text, tensors) != stored.get("digest"):
        raise damaged
    facts: dict[str, Any] = json.loads(text)
    return facts, tensors


@torch.no_grad()
def _restore(
    kept: dict[str, Any], tensors: dict[str, Tensor], writer: FastDiamond, optimiser: torch.optim.Optimizer
) -> None:
    for name, parameter in writer.named_parameters():
        parameter.copy_(tensors[f"writer.{name}"])
        if f"{MOMENTS[0]}.{name}" in tensors:
            optimiser.state[parameter] = {
                "step": torch.tensor(float(kept["steps"])),
                **{moment: tensors[f"{moment}.{name}"].to(parameter) for moment in MOMENTS},
            }


def _difference(name: str, kept: Any, wanted: Any) -> str:
    """Return in words in what two facts differ."""
    if isinstance(kept, dict) and isinstance(wanted, dict):
        for key in wanted:
            if kept.get(key) != wanted[key]:
                return _difference(key, kept.get(key), wanted[key])
    return f"another {name} ({kept}, not {wanted})" if not isinstance(wanted, dict) else f"another {name}"
