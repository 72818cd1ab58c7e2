"""AdamW over a few tensors, with moments that can be written down and taken up again exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentcompact.errors import CacheFileError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(parameters: Sequence[Tensor], rate: float, decay: float) -> torch.optim.AdamW:
    """Return AdamW with betas 0.9 and 0.999, epsilon 1e-8, a constant rate and a decoupled weight decay."""
    return torch.optim.AdamW(list(parameters), lr=rate, weight_decay=decay)


def moments(optimiser: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the optimiser's moments by name, "<parameter>.<moment>"; nothing before the first update."""
    return {
        f"{number}.{name}": optimiser.state[parameter][name].detach().clone()
        for number, parameter in enumerate(optimiser.param_groups[0]["params"])
        if parameter in optimiser.state
        for name in MOMENTS
    }


def restore_moments(optimiser: torch.optim.AdamW, kept: Mapping[str, Tensor]) -> None:
    """Take up moments that `moments` returned. Raises CacheFileError where they fit other parameters."""
    parameters = optimiser.param_groups[0]["params"]
    for number, parameter in enumerate(parameters):
        found = {name: kept[f"{number}.{name}"] for name in MOMENTS if f"{number}.{name}" in kept}
        if not found:
            continue
        if len(found) != len(MOMENTS) or found["exp_avg"].shape != parameter.shape:
            raise CacheFileError("the checkpoint's optimiser state does not fit its entries: begin again")
        optimiser.state[parameter] = {
            name: value.clone() if name == "step" else value.clone().to(parameter.device)
            for name, value in found.items()
        }
