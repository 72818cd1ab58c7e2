"""The frozen model's own passes in training: hidden states behind a cache, and the logits they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.errors import UnsupportedModelError
from agentcompact.models import LoadedModel


def hidden_states(model: LoadedModel, cache: CompactedCache, token_ids: Sequence[int]) -> Tensor:
    """Append token ids to a cache of one sequence; return the last hidden state behind each, (n, hidden size)."""
    start = cache.next_position
    ids = torch.tensor([list(token_ids)], device=model.device)
    positions = torch.arange(start, start + len(token_ids), device=model.device)[None]
    decoder = model.causal_lm.get_decoder()
    states: Tensor = decoder(input_ids=ids, cache=cache, position_ids=positions, use_cache=True).last_hidden_state
    return states[0]


def logits_of(model: LoadedModel, hidden: Tensor) -> Tensor:
    """Return the logits (n, vocabulary) float32 that last hidden states (n, hidden size) mean."""
    logits: Tensor = model.causal_lm.get_output_embeddings()(hidden).float()
    cap = _final_cap(model)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def check_forward(model: LoadedModel, cache: CompactedCache) -> None:
    """Raise UnsupportedModelError where the model's logits are not those of `logits_of`; cache: an empty one."""
    ids = list(range(1, 5))
    expected = model.causal_lm(input_ids=torch.tensor([ids], device=model.device)).logits[0].float()
    given = logits_of(model, hidden_states(model, cache, ids))
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    if not torch.allclose(expected, given, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise UnsupportedModelError(
            f"models of type '{model.geometry.model_type}': how their last hidden states become logits is not known, "
            "so no writer can be trained for them"
        )


def _final_cap(model: LoadedModel) -> float | None:
    config: Any = model.causal_lm.config.get_text_config(decoder=True)
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)
