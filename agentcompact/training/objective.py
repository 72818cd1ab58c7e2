"""The losses: forward KL on the continuation, normalised; and the error of each layer's attention outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache, Span
from agentcompact.cache.attention import read_entries
from agentcompact.engines import TransformersEngine
from agentcompact.training.forward import hidden_states, logits_of
from agentcompact.training.windows import Cue
from agentcompact.writers import FastDiamond, write_span

SMALLEST_DIVERGENCE = 1e-6


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) in nats a token; logits (tokens, vocabulary)."""
    wanted, given = teacher.log_softmax(dim=-1), student.log_softmax(dim=-1)
    return (wanted.exp() * (wanted - given)).sum(dim=-1).mean()


def written_cache(
    writer: FastDiamond, engine: TransformersEngine, context: CompactedCache, applications: int = 1
) -> CompactedCache:
    """Return the context's cache as the writer compacts it, applied chunk by chunk; gradients reach the writer.

    Each application after the first reads what the one before wrote and as many raw entries as the context leaves.
    """
    cache, settings = context.fork(), writer.settings
    step = settings.context - settings.latents
    for place, (index, layer) in enumerate(cache.full_layers):
        total = layer.before
        entries = cache.source(index, 0, total)
        borders = [total - (applications - 1 - part) * step for part in range(applications)]
        span = entries.within(0, borders[0])
        for part, border in enumerate(borders):
            if part:
                span = _joined(span, entries.within(borders[part - 1], border))
            span = write_span(writer, place, span, settings.latents, engine.rotate)
        layer.hold(span, total)
    return cache


def _joined(first: Span, second: Span) -> Span:
    """Put two spans of equally long heads one after another."""
    parts = [
        torch.cat([first.dense(a), second.dense(b)], dim=1)
        for a, b in (
            (first.keys, second.keys),
            (first.values, second.values),
            (first.positions, second.positions),
            (first.bias, second.bias),
        )
    ]
    return Span.from_dense(parts[0], parts[1], parts[2], parts[3])


def continuation_loss(
    engine: TransformersEngine, compacted: CompactedCache, cue: Cue, said: dict[str, Tensor]
) -> Tensor:
    """Return KL to the full cache over KL without context, both over the continuation behind the cue.

    said: what the teacher says behind the cue (`Teacher.cue`). Source: section 2, equation 2, and appendix A, table 2.
    """
    model = engine.model
    hidden = hidden_states(model, compacted, cue.ids[:-1])[-cue.continuation :]
    teacher = logits_of(model, said["hidden"].to(model.device, model.dtype))
    return divergence(teacher, logits_of(model, hidden)) / (float(said["nothing"]) + SMALLEST_DIVERGENCE)


def attention_loss(engine: TransformersEngine, compacted: CompactedCache, said: dict[str, Tensor]) -> Tensor:
    """Return the squared error of attention outputs relative to their squares, by layer and averaged.

    Each layer's queries are the teacher's, who also gives what they read from the tail: layers are trained for
    themselves, without a pass through the model. Source: appendix C, equations 12 and 13, teacher queries for both.
    """
    losses = []
    device, scaling = engine.model.device, engine.geometry.scaling
    for index, layer in compacted.full_layers:
        span = compacted.source(index, 0, layer.before)
        queries, outputs, tail, tail_mass = (
            said[f"{name}.{index}"].to(device).float() for name in ("queries", "outputs", "tail", "mass")
        )
        keys, values, bias = (span.dense(part)[None].float() for part in (span.keys, span.values, span.bias))
        grouped = queries.reshape(1, span.heads, -1, queries.shape[-1])
        read, mass = read_entries(grouped, keys, values, bias[:, :, None], scaling)
        read, mass = (part.reshape(*queries.shape[:2], -1) for part in (read, mass))
        share = (mass - torch.logaddexp(mass, tail_mass)).exp()
        error = read * share + tail * (1 - share) - outputs
        losses.append((error.square().sum(dim=(1, 2)) / outputs.square().sum(dim=(1, 2))).mean())
    return torch.stack(losses).mean()
