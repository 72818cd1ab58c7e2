"""Stage 2 of a latent compaction: the losses that make a compacted cache predict what the full cache predicted.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026), section 3.4, equations 9, 10 and 13.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_TAIL = 1e-8
"""Tail probabilities are floored here, on both sides."""


def grouped_divergence(logits: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence over the teacher's top tokens and one group of all others (equation 9).

    logits: (steps, vocabulary), the student's. ids: (steps, k), the teacher's top tokens. teacher: (steps, k), their
    log-probabilities, not renormalised. Returns (steps,).
    """
    student = logits.log_softmax(dim=-1).gather(1, ids)
    teacher = teacher.to(student.dtype)
    tail = (1 - teacher.exp().sum(dim=1)).clamp(min=SMALLEST_TAIL)
    reached = (1 - student.exp().sum(dim=1)).clamp(min=SMALLEST_TAIL)
    return (teacher.exp() * (teacher - student)).sum(dim=1) + tail * (tail.log() - reached.log())


def full_divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the divergence over the whole vocabulary, (steps,); logits of student and teacher: (steps, vocabulary)."""
    teacher, student = teacher_logits.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    return (teacher.exp() * (teacher - student)).sum(dim=1)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the teacher's tokens (steps,) under logits (steps, vocabulary): (steps,)."""
    return torch.nn.functional.cross_entropy(logits, tokens, reduction="none")


def rollout_loss(logits: Tensor, tokens: Tensor, divergence: Tensor, *, cross_entropy: bool = True) -> Tensor:
    """Return one rollout's loss, a scalar: the mean divergence, plus the mean cross-entropy (equation 10).

    logits: (steps, vocabulary). tokens, divergence: (steps,).
    """
    loss = divergence.mean()
    return loss + next_token_loss(logits, tokens).mean() if cross_entropy else loss
