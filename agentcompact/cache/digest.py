"""A digest of tensors and what is said of them, by which a damaged file is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return blake2b over a header text and each tensor's name, dtype, shape and bytes; tensors on the CPU."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
