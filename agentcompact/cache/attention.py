"""Attention over a compacted span and the live tail behind it, registered with transformers under our own name.

The two are one softmax: each gives an output and a log-normalizer (the log of its attention mass), and the
outputs are weighted by the masses in log space. A batch of sequences reads one shared span without copying it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    span_output, span_mass = _span_branch(query, span, scaling)
    tail_output, tail_mass = tail_branch(query, key, value, mask, scaling)
    total = torch.logaddexp(span_mass, tail_mass)
    merged = span_output * (span_mass - total).exp() + tail_output * (tail_mass - total).exp()
    return merged.to(query.dtype)


def _span_branch(query: Tensor, span: Span, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and log-normalizer (..., 1) over the span for query (batch, query_heads, q, head_dim)."""
    batch, query_heads, q, dim = query.shape
    kv_heads = span.heads
    grouped = query.reshape(batch, kv_heads, query_heads // kv_heads, q, dim)
    folded = grouped.transpose(0, 1).reshape(1, kv_heads, -1, dim)
    if span.is_uniform:
        keys, values, bias = (span.dense(t)[None] for t in (span.keys, span.values, span.bias))
        output, mass = read_entries(folded, keys, values, bias[:, :, None], scaling)
    elif query.device.type == "cpu":
        heads = [
            read_entries(folded[:, h : h + 1], keys[None, None], values[None, None], bias[None, None, None], scaling)
            for h, (keys, values, bias, _) in enumerate(span)
        ]
        output, mass = (torch.cat(t, dim=1) for t in zip(*heads, strict=True))
    else:
        keys, values, bias = (t[None] for t in _padded(span))
        output, mass = read_entries(folded, keys, values, bias[:, :, None], scaling)
    shape = (kv_heads, batch, query_heads // kv_heads, q)
    unfolded = (t.reshape(*shape, -1).transpose(0, 1).reshape(batch, query_heads, q, -1) for t in (output, mass))
    return next(unfolded), next(unfolded)


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


def tail_branch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output and log-normalizer (..., 1) over the tail for query (batch, query_heads, q, head_dim)."""
    batch, query_heads, q, dim = query.shape
    kv_heads, n = key.shape[1], key.shape[2]
    if q == 1:
        folded = query.reshape(batch, kv_heads, query_heads // kv_heads, dim)
        output, mass = read_entries(folded, key, value, None if mask is None else _added(mask), scaling)
        return output.reshape(batch, query_heads, 1, -1), mass.reshape(batch, query_heads, 1, 1)
    if mask is None and n > q:
        mask = torch.ones(q, n, dtype=torch.bool, device=query.device).tril(n - q)[None, None]
    added = None if mask is None else _added(mask)
    keys, values = (t.repeat_interleave(query_heads // kv_heads, dim=1) for t in (key, value))
    return read_entries(query, keys, values, added, scaling, causal=mask is None)


def _added(mask: Tensor) -> Tensor:
    """Return a mask as float32 to be added to scores; kept with the mask, which all layers of a pass share."""
    added: Tensor | None = getattr(mask, "agentcompact_added", None)
    if added is None:
        lowest = torch.finfo(torch.float32).min
        if mask.dtype == torch.bool:
            added = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, lowest)
        else:
            added = mask.float().clamp(min=lowest)
        mask.agentcompact_added = added  # type: ignore[attr-defined]
    return added


def read_entries(
    query: Tensor, keys: Tensor, values: Tensor, added: Tensor | None, scaling: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return softmax(scaling query keys^T + added) values, and its log-normalizer (batch, heads, m, 1) in float32.

    query: (batch, heads, m, d). keys, values: (batch, heads, n, d). added: broadcastable to (batch, heads, m, n).
    causal: whether query i sees the keys up to i alone; m and n must be the same then.
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], keys.shape[2])
    if keys.shape[2] == 0:  # the fused kernel divides by it
        nothing = query.new_full((*query.shape[:3], 1), float("-inf"), dtype=torch.float32)
        return query.new_zeros(*query.shape[:3], values.shape[3]), nothing
    if FUSED is not None and _fuses(query, keys, values, added):
        output, mass = FUSED(
            query, keys, values, 0.0, causal, attn_mask=None if added is None else added.expand(shape), scale=scaling
        )
        return output, mass[..., None]
    if causal:
        added = _added(torch.ones(shape[2:], dtype=torch.bool, device=query.device).tril()[None, None])
    rows = max(1, SCORE_ELEMENTS // (shape[0] * shape[1] * shape[3]))
    added = None if added is None else added.expand(*added.shape[:2], shape[2], added.shape[3])
    parts = []
    for start in range(0, shape[2], rows):
        # In float32 throughout: a score of half precision is off by whole units where queries and keys are large.
        scores = _wide(query[:, :, start : start + rows]) @ _wide(keys).transpose(2, 3) * scaling
        if added is not None:
            scores = (scores + added[:, :, start : start + rows]).clamp(min=torch.finfo(scores.dtype).min)
        parts.append(_softmax_read(scores, values))
    output, mass = (torch.cat(t, dim=2) for t in zip(*parts, strict=True))
    return output, mass


FUSED: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
)
"""The kernel behind PyTorch's own attention on CPUs, which gives the log-normalizer too: 2 to 3 times faster here."""


def _fuses(query: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> bool:
    """Whether the fused kernel can do it: on a CPU, of one width, and without gradients (it has none for `added`)."""
    if query.device.type != "cpu" or values.shape[3] != keys.shape[3]:
        return False
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or keys.dtype != query.dtype:
        return False
    tensors = [query, keys, values] + ([] if added is None else [added])
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 where it is narrower."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _softmax_read(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) values and the log-normalizer (..., m, 1)."""
    mass = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - mass).exp() @ _wide(values), mass
