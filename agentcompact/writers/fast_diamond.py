"""The Fast Diamond writer: one single-head cross-attention of latents over the entries of a layer and head.

Source: "The Optimization Landscape of Learning Compacted Context Models", section 5, equations 7 to 9 and 11. What the
paper leaves open is settled so: the rotary embedding inside the writer pairs dimension i of the keys with dimension i
of the values, and measures distance from latent to latent; the entries' biases are added to the logits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from agentcompact.writers.settings import Sharing, WriterSettings

SMALLEST_NORM = 1e-6


class FastDiamond(nn.Module):
    """Latents Z (t, 2d) and projections W_K, W_V, W_O (2d, 2d), for each layer and KV head or shared between them.

    The readouts W_key = [I 0] and W_value = [0 I] are frozen, so they are the two halves of the output and no tensors.
    """

    def __init__(self, settings: WriterSettings, layers: int, kv_heads: int, head_dim: int, seed: int = 0) -> None:
        """layers: the model's layers of full attention. seed: of what begins at random."""
        super().__init__()
        self.settings = settings
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        width = 2 * head_dim
        generator = torch.Generator().manual_seed(seed)
        identity = torch.eye(width)
        random = settings.initialisation == "kvid"
        square = (*self._shared(settings.share_projections), width, width)
        bank = (*self._shared(settings.share_latents), settings.latents, width)
        if random:
            key, latents = (torch.randn(shape, generator=generator) / width**0.5 for shape in (square, bank))
        else:
            key, latents = identity.expand(square), _block_diagonal(*bank[2:]).expand(bank)
        self.key = nn.Parameter(key.clone())
        self.value = nn.Parameter(identity.expand(square).clone())
        self.output = nn.Parameter(identity.expand(square).clone())
        self.latents = nn.Parameter(latents.clone())
        self.weight = nn.Parameter(torch.zeros(bank[:3])) if settings.weights == "trained" else None
        self._derived: dict[tuple[object, ...], dict[int, Derived]] = {}

    def _shared(self, sharing: Sharing) -> tuple[int, int]:
        return (
            self.layers if sharing in ("layer", "layer_head") else 1,
            self.kv_heads if sharing in ("head", "layer_head") else 1,
        )

    @torch.no_grad()
    def anchor(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Let a layer's first latent look for entries like those given.

        keys, values: (examples, kv_heads, head_dim), keys un-rotated; what heads or layers share gets the mean, of the
        layer that is anchored last.
        """
        mean = _unit(torch.cat([keys, values], dim=-1)).mean(dim=0)
        of_layer = self.latents[layer if len(self.latents) > 1 else 0]
        of_layer[:, 0] = mean if len(of_layer) > 1 else mean.mean(dim=0, keepdim=True)

    def forward(
        self, layer: int, keys: Tensor, values: Tensor, bias: Tensor, count: int, heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Write `count` entries for each head from its n entries.

        layer: number among the layers of full attention. keys, values: (heads, n, head_dim), keys un-rotated. bias:
        (heads, n). count: at most the latents; fewer are taken evenly. heads: which of the layer's KV heads are given.
        Returns un-rotated keys and values, (heads, count, head_dim).
        """
        entries = torch.cat([keys, values], dim=-1)
        total, width = entries.shape[-2:]
        # Latents stand at the beginning of their share, the first at the first entry.
        share = total / count
        unit = share if self.settings.rope_unit == "latent" else 1.0
        derived = self._derive(layer, count, heads, share / unit)
        angles = _turns(total, 1 / unit, self.settings.rope_base, width // 2, entries.dtype, entries.device)
        key = _turned(_unit(entries @ derived.key), angles)
        query, key = (part.expand(len(entries), -1, -1) for part in (derived.query, key))
        # Without biases the product does not copy them into every row first.
        logits = torch.baddbmm(bias[:, None].to(entries.dtype), query, key.transpose(1, 2), beta=int(_counts(bias)))
        # softmax(..) (X W_V) W_O, with the product over the entries first: t rows are projected and not n.
        written = logits.softmax(dim=-1) @ entries @ derived.output
        return written[..., : self.head_dim], written[..., self.head_dim :]

    def biases(self, layer: int, bias: Tensor, count: int, heads: slice = slice(None)) -> Tensor:
        """Return the biases (heads, count) float32 of what `forward` writes from entries with these (heads, n)."""
        if self.settings.weights == "none":
            return torch.zeros(len(bias), count, device=bias.device)
        if _counts(bias):
            total = torch.logsumexp(bias.float(), dim=1, keepdim=True)
        else:  # original entries, which weigh one each
            total = torch.full((len(bias), 1), math.log(bias.shape[1]), device=bias.device)
        if self.weight is None:
            return (total - math.log(count)).expand(-1, count)
        return total - math.log(bias.shape[1]) + self._part(self.weight, layer, heads)[:, self._chosen(count)]

    def _chosen(self, count: int) -> Tensor:
        """Return which latents write where fewer are needed: evenly chosen, the first among them."""
        return torch.arange(count, device=self.latents.device) * self.settings.latents // count

    def _part(self, parameter: Tensor, layer: int, heads: slice) -> Tensor:
        """Return one layer's (heads or 1, ...) of a shared parameter."""
        of_layer = parameter[layer if len(parameter) > 1 else 0]
        return of_layer[heads] if len(of_layer) > 1 else of_layer

    def _derive(self, layer: int, count: int, heads: slice, step: float) -> Derived:
        """Return what forward needs of the parameters alone; the common case is remembered until they change.

        step: distance from latent to latent.
        """
        common = count == self.settings.latents and heads == slice(None) and step == 1
        if not common or torch.is_grad_enabled() or self.latents.is_inference():  # such tensors count no changes
            return self._derived_now(layer, count, heads, step)
        state = tuple((part._version, part.data_ptr()) for part in self.parameters())
        if state not in self._derived:
            self._derived = {state: {}}
        known = self._derived[state]
        if layer not in known:
            known[layer] = self._derived_now(layer, count, heads, step)
        return known[layer]

    def _derived_now(self, layer: int, count: int, heads: slice, step: float) -> Derived:
        latents = _paired(_unit(self._part(self.latents, layer, heads)[:, self._chosen(count)]))
        width = latents.shape[-1]
        angles = _turns(count, step, self.settings.rope_base, width // 2, latents.dtype, latents.device)
        return Derived(
            width * _turned(latents, angles),
            _paired(self._part(self.key, layer, heads)),
            self._part(self.value, layer, heads) @ self._part(self.output, layer, heads),
        )


class Derived(NamedTuple):
    """Of one layer: queries 2d R(z) (heads, count, 2d); W_K (heads, 2d, 2d), columns paired; and W_V W_O."""

    query: Tensor
    key: Tensor
    output: Tensor


@lru_cache(maxsize=16)
def _turns(count: int, step: float, base: float, pairs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the rotations (count, pairs), as complex numbers, of places 0, step, 2 step and so on; for all layers."""
    places, powers = (torch.arange(number, dtype=torch.float64) for number in (count, pairs))
    angles = places[:, None] * step * torch.pow(base, -powers / pairs)
    return torch.polar(torch.ones_like(angles), angles).to(device, dtype.to_complex())


def _paired(states: Tensor) -> Tensor:
    """Put dimension i + d beside i: (..., 2d). Products of states that are all so arranged stay what they are."""
    return states.reshape(*states.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def _turned(states: Tensor, turns: Tensor) -> Tensor:
    """Rotate each pair of neighbours of states (..., n, 2d) by complex numbers (n, d)."""
    pairs = torch.view_as_complex(states.reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


def _counts(bias: Tensor) -> bool:
    """Whether biases change anything: some are not zero, or they are trained."""
    return bias.requires_grad or bool(bias.any())


def _unit(states: Tensor) -> Tensor:
    """Divide by the length of the last dimension, which is taken to be at least a millionth."""
    length: Tensor = states.norm(dim=-1, keepdim=True)
    return states / length.clamp(min=SMALLEST_NORM)


def _block_diagonal(rows: int, columns: int) -> Tensor:
    """Return the identity of that shape: repeated downwards where there are more rows than columns."""
    return torch.eye(columns)[torch.arange(rows) % columns]
