"""Whether an answer is right: by the text it contains, or by the likeliest of several options."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def answer_score(text: str, answers: Sequence[str], match: str) -> float | None:
    """Score a generated text: 1 or 0 for "any" of the answers, the share of them found for "all"; None without any.

    Case is ignored. "all" is RULER's string match (Hsieh et al. 2024).
    """
    if not answers:
        return None
    found = [answer.casefold() in text.casefold() for answer in answers]
    return float(any(found)) if match == "any" else sum(found) / len(found)


def mean_log_probability(logits: Tensor, token_ids: Sequence[int]) -> float:
    """Return the mean log-probability per token of token ids under the logits (tokens, vocabulary) before each."""
    chosen = torch.tensor(list(token_ids), device=logits.device)
    return float(logits.log_softmax(dim=-1).gather(1, chosen[:, None]).mean())
