"""A model's rotary position embedding, applied to states or taken back, by the model's own angles.

Which dimensions are turned, and in which pairs, differs between architectures and is written in the code of their
attention alone. So the layouts there are get tried on the model's own keys: those of one token by itself, whose
attention is on nothing but itself, differ from position to position by the rotation alone, in every layer.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from agentcompact.errors import UnsupportedModelError
from agentcompact.models import ModelGeometry

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Cosines and sines (rows, n, width) of positions (rows, n), as the model's module makes them."""

OneTokenKeys = Callable[[int], list[Tensor]]
"""Keys (kv_heads, 1, head_dim) of the full layers for a sequence of one token at a position."""

REMEMBERED = 2
"""Position tables that are kept: all layers of a span mostly ask for the same, where they stand and where they go."""

PROBED_POSITIONS = (0, 5, 97, 1531)


@dataclass(frozen=True)
class Layout:
    """Which pairs of dimensions are turned, and where their cosines stand in what the model's module returns.

    interleaved: dimensions 2i and 2i + 1 are a pair, else i and i + half. angles: one angle a pair, stated once
    ("once"), or twice in a row of halves ("halves"), or twice side by side ("side_by_side").
    """

    interleaved: bool
    angles: Literal["halves", "side_by_side", "once"]

    def pick(self, table: Tensor) -> Tensor:
        """Return one number a pair: (..., width) -> (..., pairs)."""
        if self.angles == "once":
            return table
        return table[..., ::2] if self.angles == "side_by_side" else table[..., : table.shape[-1] // 2]

    def turn(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate the first 2 * pairs dimensions of states (..., head_dim) by angles (..., pairs)."""
        pairs = cosine.shape[-1]
        part, rest = states[..., : 2 * pairs], states[..., 2 * pairs :]
        a, b = (part[..., ::2], part[..., 1::2]) if self.interleaved else (part[..., :pairs], part[..., pairs:])
        turned = (torch.addcmul(a * cosine, b, sine, value=-1), torch.addcmul(b * cosine, a, sine))
        joined = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        return torch.cat([joined, rest], dim=-1) if rest.shape[-1] else joined


class Rotary:
    """The rotary embedding of a model's full layers."""

    def __init__(self, angles: Angles, layout: Layout) -> None:
        self._angles = angles
        self._layout = layout
        self._known: deque[tuple[bool, Tensor, Tensor, Tensor]] = deque(maxlen=REMEMBERED)

    @classmethod
    def of_model(cls, causal_lm: Any, keys_of: OneTokenKeys, geometry: ModelGeometry) -> Rotary:
        """Find a model's rotary embedding and its layout.

        keys_of: runs one token at a position. Raises UnsupportedModelError where no layout explains the keys of all
        full layers.
        """
        if not geometry.full_layers:
            raise UnsupportedModelError(
                f"models of type '{geometry.model_type}': all layers slide, none is rotated here"
            )
        probed = sorted({min(position, geometry.max_positions - 1) for position in PROBED_POSITIONS})
        keys = [torch.stack([key.float() for key in keys_of(position)]) for position in probed]
        tolerance = 1e-3 if keys_of(probed[0])[0].dtype == torch.float32 else 5e-2
        for angles in _modules_angles(causal_lm):
            for interleaved, kind in itertools.product((False, True), ("halves", "side_by_side", "once")):
                rotary = cls(angles, Layout(interleaved, kind))  # type: ignore[arg-type]
                if rotary._explains(keys, probed, tolerance):
                    return rotary
        raise UnsupportedModelError(
            f"models of type '{geometry.model_type}': how their keys are rotated cannot be told, or layers differ in it"
        )

    def rotate(self, states: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotate states (heads, n, head_dim) to positions (n,) or (heads, n), or back from there; in float32."""
        rows = positions.to(states.device).long()
        cosine, sine = self._tables(rows[None] if rows.dim() == 1 else rows, back)
        return self._layout.turn(states.float(), cosine, sine).to(states.dtype)

    def _tables(self, rows: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (rows, n, pairs) of positions; those of the last are kept, for the next layer.

        Going back divides by the square of the factor that cosine and sine carry (YaRN's attention scaling).
        """
        for known, positions, cosine, sine in self._known:
            if known == back and positions.device == rows.device and torch.equal(positions, rows):
                return cosine, sine
        cosine, sine = (self._layout.pick(table.float()) for table in self._angles(rows))
        if back:
            factor = cosine.square() + sine.square()
            cosine, sine = cosine / factor, -sine / factor
        self._known.append((back, rows.clone(), cosine, sine))
        return cosine, sine

    def _explains(self, keys: list[Tensor], positions: list[int], tolerance: float) -> bool:
        """Whether keys (layers, kv_heads, 1, head_dim) at all positions become the same when rotated back."""
        device = keys[0].device
        width = self._layout.pick(self._angles(torch.zeros(1, 1, dtype=torch.long, device=device))[0]).shape[-1]
        if 2 * width > keys[0].shape[-1]:
            return False
        plain = [
            self.rotate(each.flatten(0, 1), torch.tensor([position], device=device), back=True)
            for each, position in zip(keys, positions, strict=True)
        ]
        size = plain[0].abs().amax()
        return all(bool((each - plain[0]).abs().amax() <= tolerance * size) for each in plain[1:])


def _modules_angles(causal_lm: Any) -> Iterator[Angles]:
    """The rotary modules of a decoder, those of full layers where the kinds of layer have their own."""
    for module in causal_lm.get_decoder().modules():
        forward = type(module).forward
        if not type(module).__name__.endswith("RotaryEmbedding") or not callable(forward):
            continue
        known = inspect.signature(forward).parameters
        if "position_ids" in known:
            options = {"layer_type": "full_attention"} if "layer_type" in known else {}
            angles = _angles_of(module, options)
            if _gives_tables(angles, causal_lm.device):
                yield angles


def _angles_of(module: Any, options: dict[str, str]) -> Angles:
    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cosine, sine = module(like, position_ids=positions, **options)
        return cosine, sine

    return angles


def _gives_tables(angles: Angles, device: torch.device) -> bool:
    """Whether a module takes positions (rows, n) and returns real cosines and sines (rows, n, width)."""
    try:
        cosine, sine = angles(torch.zeros(1, 1, dtype=torch.long, device=device))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False
    return not cosine.is_complex() and cosine.dim() == 3 and cosine.shape == sine.shape
