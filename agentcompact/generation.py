"""Using a cache with transformers' own `model.generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache


def generation_inputs(cache: CompactedCache, input_ids: Tensor) -> dict[str, Any]:
    """Return the arguments with which `model.generate` continues a cache: `model.generate(**generation_inputs(...))`.

    input_ids: (batch, n), the ids that follow what the cache holds, unpadded. The attention mask covers the logical
    length too; without it transformers would take the ids for the whole sequence. The cache grows: pass a fork to
    keep it.
    """
    batch, n = input_ids.shape
    mask = torch.ones(batch, cache.next_position + n, dtype=torch.long, device=input_ids.device)
    return {"input_ids": input_ids, "attention_mask": mask, "cache": cache}
