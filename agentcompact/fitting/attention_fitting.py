"""Stage 1 of a latent compaction: entries fitted to the attention outputs and log-normalizers of all entries.

Heads of one layer, or of several, are trained in one call: the loss of each layer is its own, AdamW works on each
number alone, so they stay independent. Heads with fewer entries are padded for the products only; what is trained is
the flat list of entries, so a padding slot has neither a parameter nor a gradient.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026), section 3.3, equation 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.fitting.adamw import adamw
from agentcompact.fitting.attention_statistics import attention_statistics

SMALLEST_SCALE = 1e-4
"""Standard deviations of the teacher are floored here."""


@dataclass(frozen=True)
class AttentionTargets:
    """What the teacher's queries read from all entries, and the scales that standardise it.

    output: (heads, G, m, head_dim). log_normalizer: (heads, G, m). output_scale, mass_scale: (heads, G), the standard
    deviation of the outputs over queries and channels, and of the log-normalizers over queries, per query head. Means
    are not needed: both sides are shifted by the teacher's, and a difference forgets it.
    """

    output: Tensor
    log_normalizer: Tensor
    output_scale: Tensor
    mass_scale: Tensor

    @classmethod
    def of(cls, output: Tensor, log_normalizer: Tensor) -> AttentionTargets:
        """Add the scales to outputs and log-normalizers."""
        return cls(
            output,
            log_normalizer,
            output.flatten(2).std(dim=2, correction=0).clamp(min=SMALLEST_SCALE),
            log_normalizer.std(dim=2, correction=0).clamp(min=SMALLEST_SCALE),
        )


def attention_targets(
    queries: Tensor, heads: Sequence[tuple[Tensor, Tensor, Tensor]], scaling: float
) -> AttentionTargets:
    """Return what queries (heads, G, m, head_dim) read from each head's (keys, values, bias), in float32.

    keys, values: (n, head_dim), n differing between heads where it does, at least 1. bias: (n,).
    """
    group, m = queries.shape[1:3]
    outputs, masses = [], []
    for query, (keys, values, bias) in zip(queries, heads, strict=True):
        found = attention_statistics(
            query.reshape(1, group * m, -1), keys[None], bias[None], scaling, values[None], with_mass=False
        )
        if found.output is None:
            raise ValueError("no outputs were computed")
        outputs.append(found.output.view(group, m, -1))
        masses.append(found.log_normalizer.view(group, m))
    return AttentionTargets.of(torch.stack(outputs), torch.stack(masses))


def attention_loss(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    targets: AttentionTargets,
    scaling: float,
    *,
    match_mass: bool = True,
) -> Tensor:
    """Return each head's mean squared error of standardised outputs, plus that of standardised log-normalizers.

    queries: (heads, G, m, head_dim), those of the targets. keys, values: (heads, n, head_dim). bias: (heads, n), very
    low in slots that are padding. match_mass: whether the second term counts. Returns (heads,); the mean over a layer's
    heads is equation 8.
    """
    heads, group, m, dim = queries.shape
    scores = torch.baddbmm(bias[:, None], queries.reshape(heads, group * m, dim), keys.transpose(1, 2), alpha=scaling)
    mass = scores.logsumexp(dim=2, keepdim=True)
    output = (scores - mass).exp() @ values
    wrong = (output.view(heads, group, m, dim) - targets.output) / targets.output_scale[:, :, None, None]
    loss = wrong.square().mean(dim=(1, 2, 3))
    if match_mass:
        missed = (mass.view(heads, group, m) - targets.log_normalizer) / targets.mass_scale[:, :, None]
        loss = loss + missed.square().mean(dim=(1, 2))
    return loss


@dataclass(frozen=True)
class FitOptions:
    """How stage 1 trains. queries: positions of one update. rate, decay: of AdamW."""

    queries: int = 128
    rate: float = 3e-3
    decay: float = 0.0
    match_mass: bool = True
    biases: bool = True


class AttentionFit:
    """Trains the free entries of some heads; all heads have as many query positions.

    queries: (heads, G, positions, head_dim). entries: per head (keys, values, bias) in float32, keys and values (n,
    head_dim), bias (n,). frozen: per head (n,) bool. samples: (updates, heads, positions an update), which queries each
    update takes. layer_heads: heads of one layer, over which its loss is averaged.
    """

    def __init__(
        self,
        queries: Tensor,
        targets: AttentionTargets,
        entries: Sequence[tuple[Tensor, Tensor, Tensor]],
        frozen: Sequence[Tensor],
        samples: Tensor,
        layer_heads: int,
        scaling: float,
        options: FitOptions,
    ) -> None:
        self._queries, self._targets, self._samples = queries, targets, samples
        self._layer_heads, self._scaling, self._options = layer_heads, scaling, options
        self._lengths = [len(each[0]) for each in entries]
        widest, device = max(self._lengths), queries.device
        keys, values, bias = (
            torch.nn.utils.rnn.pad_sequence([each[part] for each in entries], batch_first=True, padding_value=fill)
            for part, fill in ((0, 0.0), (1, 0.0), (2, torch.finfo(torch.float32).min / 2))
        )
        self._base = (keys, values, bias)
        self._entries = list(entries)
        self._slots = [torch.nonzero(~each.to(device))[:, 0] for each in frozen]
        self._apart = device.type == "cpu" and len(set(self._lengths)) > 1
        held = torch.nn.utils.rnn.pad_sequence(list(frozen), batch_first=True, padding_value=True)
        self._free = tuple(torch.nonzero(~held.to(device), as_tuple=True))
        if keys.shape[1] != widest:
            raise ValueError("keys and biases of a head differ in number")
        self.parameters = [part[self._free].clone().requires_grad_() for part in self._base]
        self._trained = self.parameters if options.biases else self.parameters[:2]
        self.optimiser = adamw(self._trained, options.rate, options.decay)

    def loss(self, update: int) -> Tensor:
        """Return the loss of each head in an update, (heads,)."""
        rows = self._samples[update].to(self._queries.device)
        place = torch.arange(len(rows), device=rows.device)[:, None]
        picked = AttentionTargets(
            self._targets.output[place, :, rows].transpose(1, 2),
            self._targets.log_normalizer[place, :, rows].transpose(1, 2),
            self._targets.output_scale,
            self._targets.mass_scale,
        )
        queries = self._queries[place, :, rows].transpose(1, 2).float()
        if self._apart:
            return self._loss_apart(queries, picked)
        keys, values, bias = self._padded()
        return attention_loss(queries, keys, values, bias, picked, self._scaling, match_mass=self._options.match_mass)

    def _loss_apart(self, queries: Tensor, targets: AttentionTargets) -> Tensor:
        """Return the loss of each head, (heads,), a head at a time: a processor would pay for padding."""
        parts = [torch.split_with_sizes(free, [len(slots) for slots in self._slots]) for free in self.parameters]
        losses = []
        for head, (whole, slots) in enumerate(zip(self._entries, self._slots, strict=True)):
            keys, values, bias = (
                base.index_put((slots,), part[head])[None] for base, part in zip(whole, parts, strict=True)
            )
            own = slice(head, head + 1)
            picked = AttentionTargets(
                targets.output[own], targets.log_normalizer[own], targets.output_scale[own], targets.mass_scale[own]
            )
            match = self._options.match_mass
            losses.append(attention_loss(queries[own], keys, values, bias, picked, self._scaling, match_mass=match))
        return torch.cat(losses)

    def step(self, update: int) -> float:
        """Make one update; return the mean loss of the layers before it."""
        with torch.enable_grad():
            loss = self.loss(update).sum() / self._layer_heads
            gradients = torch.autograd.grad(loss, self._trained)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimiser.step()
        return float(loss.detach()) * self._layer_heads / len(self._lengths)

    def entries(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each head's (keys, values, bias) as they are now."""
        with torch.no_grad():
            padded = self._padded()
        return [
            (padded[0][head, :n].clone(), padded[1][head, :n].clone(), padded[2][head, :n].clone())
            for head, n in enumerate(self._lengths)
        ]

    def _padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values (heads, widest, head_dim) and biases (heads, widest), the free ones put in."""
        keys, values, bias = (
            base.index_put(self._free, free) for base, free in zip(self._base, self.parameters, strict=True)
        )
        return keys, values, bias


def sample_rows(
    generator: torch.Generator, updates: int, count: int, rows: int, last: int = 0, share: float = 0.0
) -> Tensor:
    """Return which of `rows` rows each update takes, with replacement: (updates, count) int64.

    last: rows at the end that are drawn apart from the others: `share` of each update's, rounded, where there are any.
    """
    apart = min(count, round(count * share)) if last else 0
    drawn = []
    if count > apart:
        drawn.append(torch.randint(rows - last, (updates, count - apart), generator=generator))
    if apart:
        drawn.append(torch.randint(rows - last, rows, (updates, apart), generator=generator))
    return torch.cat(drawn, dim=1)


def seeded(seed: int, number: int) -> torch.Generator:
    """Return the generator of a seed for one of several draws."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
