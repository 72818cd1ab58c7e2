"""Attention over a compacted span and the live tail behind it, registered with transformers under our own name.

The two are one softmax: each gives an output and a log-normalizer (the log of its attention mass), and the
outputs are weighted by the masses in log space. A batch of sequences reads one shared span without copying it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agentcompact.cache.layers import ATTENTION_NAME, FullLayer, SlidingLayer
from agentcompact.cache.span import Span

SCORE_ELEMENTS = 1 << 20
"""Scores computed at a time: a few MB stay in a processor's cache, and memory stays bounded in a long prefill."""


def register_attention() -> None:
    """Make the attention function known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' interface: query (batch, query_heads, q, head_dim), key and value the live tail's.

    Without a compacted span this is transformers' own scaled-dot-product attention.
    """
    layer: FullLayer | SlidingLayer | None = getattr(key, "agentcompact_layer", None)
    if layer is not None and layer.observer is not None:
        layer.observer(query)
    if isinstance(layer, SlidingLayer):
        mask = layer.mask(query.shape[2], key.shape[2])
        attention_mask = attention_mask if mask is None else mask
    if not isinstance(layer, FullLayer) or layer.span is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return plain
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attend(query, layer.span, key, value, attention_mask, scale)
    return output.transpose(1, 2).contiguous(), None


def attend(query: Tensor, span: Span, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend to the span (score + bias) and causally to the tail; return (batch, query_heads, q, head_dim).

    query: (batch, query_heads, q, head_dim). key, value: (batch, kv_heads, n, head_dim), the last q of them the
    queries' own. mask: (batch, 1, q, n), True where the tail may be seen, or additive floats, or None for causal.
    """
    batch, query_heads, q, _ = query.shape
    kv_heads, n = key.shape[1], key.shape[2]
    if mask is None and q > 1:
        mask = torch.ones(q, n, dtype=torch.bool, device=query.device).tril(n - q)[None, None]
    widest = max(n, max(span.lengths))
    rows = max(1, SCORE_ELEMENTS // (batch * query_heads * widest))
    grouped = query.reshape(batch, kv_heads, query_heads // kv_heads, q, -1)
    parts = []
    for start in range(0, q, rows):
        stop = min(start + rows, q)
        block = grouped[:, :, :, start:stop]
        block_mask = None if mask is None else mask[:, :, None, start:stop]
        parts.append(_attend_block(block, span, key, value, block_mask, scaling))
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return output.reshape(batch, query_heads, q, -1)


def _attend_block(query: Tensor, span: Span, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Both branches and their merge for query (batch, kv_heads, group, q, head_dim)."""
    span_output, span_mass = _span_branch(query, span, scaling)
    tail_output, tail_mass = _tail_branch(query, key, value, mask, scaling)
    total = torch.logaddexp(span_mass, tail_mass)
    merged = span_output * (span_mass - total).exp() + tail_output * (tail_mass - total).exp()
    return merged.to(query.dtype)


def _span_branch(query: Tensor, span: Span, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and log-normalizer over the span for query (batch, kv_heads, group, q, head_dim), in float32."""
    batch, kv_heads, group, q, dim = query.shape
    folded = query.transpose(0, 1).reshape(kv_heads, batch * group * q, dim)
    if span.is_uniform:
        keys, values, bias = (span.dense(t) for t in (span.keys, span.values, span.bias))
        output, mass = _softmax_read(_scores(folded, keys, bias[:, None], scaling), values)
    elif query.device.type == "cpu":
        heads = [
            _softmax_read(_scores(folded[h : h + 1], keys[None], bias[None, None], scaling), values[None])
            for h, (keys, values, bias, _) in enumerate(span)
        ]
        output, mass = (torch.cat(t) for t in zip(*heads, strict=True))
    else:
        keys, values, bias = _padded(span)
        output, mass = _softmax_read(_scores(folded, keys, bias[:, None], scaling), values)
    shape = (kv_heads, batch, group, q)
    return output.view(*shape, -1).transpose(0, 1), mass.view(*shape, 1).transpose(0, 1)


def _padded(span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the heads to the longest, for one call on a device where many small ones are slow; nothing is kept."""
    widest = max(span.lengths)
    device = span.keys.device
    starts = torch.tensor(span.offsets[:-1], device=device)[:, None]
    lengths = torch.tensor(span.lengths, device=device)[:, None]
    slot = torch.arange(widest, device=device)[None]
    rows = (starts + slot).clamp(max=span.entries - 1)
    bias = span.bias[rows].masked_fill(slot >= lengths, torch.finfo(torch.float32).min)
    return span.keys[rows], span.values[rows], bias


def _tail_branch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output and log-normalizer over the tail for query (batch, kv_heads, group, q, head_dim), in float32."""
    batch, kv_heads, group, q, dim = query.shape
    n = key.shape[2]
    # In float32 throughout: a score of half precision is off by whole units where queries and keys are large.
    scores = _wide(query.reshape(batch, kv_heads, group * q, dim)) @ _wide(key).transpose(2, 3) * scaling
    if mask is not None:
        wide = scores.view(batch, kv_heads, group, q, n)
        lowest = torch.finfo(torch.float32).min
        wide = wide.masked_fill(~mask, lowest) if mask.dtype == torch.bool else (wide + mask).clamp(min=lowest)
        scores = wide.view(batch, kv_heads, group * q, n)
    output, mass = _softmax_read(scores, value)
    return output.view(batch, kv_heads, group, q, -1), mass.view(batch, kv_heads, group, q, 1)


def _scores(query: Tensor, keys: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """scaling * query keys^T + bias in float32: (heads, m, d), (heads, n, d), (heads, 1, n) -> (heads, m, n)."""
    wide = _wide(query)
    return torch.baddbmm(bias.to(wide.dtype), wide, _wide(keys).transpose(1, 2), alpha=scaling)


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 where it is narrower."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _softmax_read(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) values and the log-normalizer (..., m, 1); `scores` is used up."""
    highest = scores.detach().amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    output = (weights @ _wide(values)) / total
    return output, highest + total.log()
