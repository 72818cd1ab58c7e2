"""Prompts of one batch, read behind a cache and waiting for what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache


@dataclass
class PromptBatch:
    """One prompt a row, padded on the left, already in the cache.

    cache: of as many sequences as there are rows. logits: (rows, vocabulary), behind each prompt. padding: (rows,),
    slots left empty before each. seen: (rows, slots), 1 where a slot may be attended to; None where none is padded.
    """

    cache: CompactedCache
    logits: Tensor
    padding: Tensor
    seen: Tensor | None

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    def fork(self) -> PromptBatch:
        """Return a batch that goes its own way from here, sharing everything so far."""
        return PromptBatch(self.cache.fork(), self.logits, self.padding, self.seen)

    def select(self, rows: Sequence[int]) -> PromptBatch:
        """Return a batch with these rows, in this order, each as often as it is named."""
        other = self.fork()
        other.keep(rows)
        return other

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        index = torch.tensor(rows, dtype=torch.long, device=self.logits.device)
        self.cache.batch_select_indices(index)
        self.logits, self.padding = self.logits[index], self.padding[index]
        self.seen = None if self.seen is None else self.seen[index]

    def lengthen(self, tokens: int) -> None:
        """Let `tokens` more slots be seen in every row."""
        if self.seen is not None:
            self.seen = torch.cat([self.seen, self.seen.new_ones(self.rows, tokens)], dim=1)


def padded_rows(
    prompts: Sequence[Sequence[int]], start: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids (rows, longest) padded on the left, the padding of each row, and `seen` as in `PromptBatch`."""
    longest = max(len(prompt) for prompt in prompts)
    filler = prompts[0][0]
    ids = torch.tensor([[filler] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    if not bool(padding.any()):
        return ids, padding, None
    seen = torch.ones(len(prompts), start + longest, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, start : start + longest - len(prompt)] = 0
    return ids, padding, seen
