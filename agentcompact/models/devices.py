"""Choose the device and the number format of a model, and see where a loaded one is."""

from __future__ import annotations

from typing import Any

import torch

from agentcompact.errors import InputError, UnsupportedModelError

AUTO = "auto"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str) -> torch.device:
    """The torch device called `device`; "auto" is the first CUDA GPU if there is one, otherwise the CPU.

    Raises:
        InputError: if there is no such device here.
    """
    if device == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        if chosen.type != "meta":
            torch.zeros(1, device=chosen)
            return chosen
    except (RuntimeError, NotImplementedError, AssertionError, ModuleNotFoundError) as error:
        raise InputError(f"the device '{device}' is not available here; try 'cpu' or 'auto'") from error
    raise InputError("the device 'meta' holds no weights; try 'cpu' or 'auto'")


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype called `dtype`; "auto" is float32 on the CPU and bfloat16 elsewhere.

    Raises:
        InputError: naming the choices, if it is none of them.
    """
    if dtype == AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise InputError(f"the dtype '{dtype}' is not one of: {', '.join((AUTO, *DTYPES))}")
    return DTYPES[dtype]


def check_one_device(causal_lm: Any) -> None:
    """Refuse a model whose weights are spread over several devices, or are not in memory at all.

    Raises:
        UnsupportedModelError: naming the devices.
    """
    planned = {_device_name(device) for device in (getattr(causal_lm, "hf_device_map", None) or {}).values()}
    actual = {_device_name(parameter.device) for parameter in causal_lm.parameters()}
    devices = max(actual, planned, key=len)
    absent = sorted((actual | planned) & {"disk", "meta"})
    name = type(causal_lm).__name__
    if absent:
        raise UnsupportedModelError(f"the {name} keeps weights on '{absent[0]}'; load it whole onto one device")
    if len(devices) > 1:
        spread = ", ".join(sorted(devices))
        raise UnsupportedModelError(
            f"the {name} is spread over several devices ({spread}); load it whole onto one device"
        )


def _device_name(device: Any) -> str:
    """One spelling for a device of a device map: a number, a string or a torch device."""
    return f"cuda:{device}" if isinstance(device, int) else str(device)
