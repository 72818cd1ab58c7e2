"""How near the next-token distributions are to the full cache's, on the full cache's own continuations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def continuation_fidelity(full: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Return the mean KL divergence KL(full || other) in nats, and the share of tokens with the same likeliest one.

    full, other: per continuation the logits (tokens, vocabulary) that predict each of its tokens. Both are averaged
    over all tokens of all continuations; None where there are none.
    """
    tokens, divergence, same = 0, 0.0, 0
    for reference, logits in zip(full, other, strict=True):
        wanted, given = reference.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        divergence += float((wanted.exp() * (wanted - given)).sum(dim=-1).clamp(min=0).sum())
        same += int(torch.eq(reference.argmax(dim=-1), logits.argmax(dim=-1)).sum())
        tokens += len(reference)
    return (divergence / tokens, same / tokens) if tokens else (None, None)
