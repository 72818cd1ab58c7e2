"""Reading given continuations behind a cache, with gradients to its entries where they ask for some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.errors import DocumentError

if TYPE_CHECKING:
    from agentcompact.engines.base import EngineCounters
    from agentcompact.models import LoadedModel, ModelGeometry

Observer = Callable[[int, Tensor], None]
"""Called with a full layer's index and its queries (rows, query_heads, tokens, head_dim), before they attend."""


class ForcedReading:
    """What `TransformersEngine` does with continuations that are given; rows are padded on the right.

    Attention is causal, so no token sees the padding behind its row, positions are the same in all rows, and no mask is
    needed.
    """

    model: LoadedModel
    geometry: ModelGeometry
    counters: EngineCounters

    def check_room(self, start: int, tokens: int, more: int = 0) -> None:
        raise NotImplementedError

    def forced_logits(
        self,
        cache: CompactedCache,
        turns: Sequence[tuple[Sequence[int], Sequence[int]]],
        observer: Observer | None = None,
    ) -> list[Tensor]:
        """Read (prompt, continuation) pairs of token ids behind a cache, one a row, all in one pass.

        Returns for each what predicts its continuation: (tokens, vocabulary), float32 or wider. The cache stays as it
        is. Gradients flow to the keys, values and biases of its spans where those require them and gradients are
        enabled; a loaded model's weights ask for none. observer: sees the queries, those of the last tokens too.
        Raises DocumentError for a prompt or a continuation without tokens, ContextLengthError where one does not fit.
        """
        if not turns or any(not len(prompt) or not len(answer) for prompt, answer in turns):
            raise DocumentError("a prompt and a continuation of at least one token each are needed")
        last = None if observer is not None else -1
        rows = [[*prompt, *answer[:last]] for prompt, answer in turns]
        longest, start = max(len(row) for row in rows), cache.next_position
        self.check_room(start, longest)
        places = [range(len(prompt) - 1, len(prompt) - 1 + len(answer)) for prompt, answer in turns]
        wanted = sorted({place for each in places for place in each})
        column = {place: number for number, place in enumerate(wanted)}
        device = self.model.device
        filled = torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in rows], device=device)
        behind = cache.fork(batch_size=len(rows))
        watching = nullcontext() if observer is None else behind.observed(observer)
        with watching:
            output = self.model.causal_lm(
                input_ids=filled,
                cache=behind,
                position_ids=torch.arange(start, start + longest, device=device)[None].expand(len(rows), -1),
                use_cache=True,
                logits_to_keep=torch.tensor(wanted, device=device),
            )
        self.counters.prefilled_tokens += sum(len(row) for row in rows)
        wide = torch.promote_types(output.logits.dtype, torch.float32)
        return [output.logits[row, column[each[0]] : column[each[-1]] + 1].to(wide) for row, each in enumerate(places)]

    def gradient_bytes(self, rows: int, tokens: int, entries: float, predicted: int) -> int:
        """Estimate the bytes that a pass with gradients holds at its peak.

        rows, tokens: of the batch. entries: that each query head attends to, on average. predicted: positions whose
        logits are made.
        """
        config = self.model.causal_lm.config.get_text_config(decoder=True)
        hidden = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        size = torch.finfo(self.model.dtype).bits // 8
        states = rows * tokens * (10 * hidden + 4 * inner) * size
        scores = rows * tokens * self.geometry.query_heads * (3 * entries + 3 * tokens) * 4
        logits = rows * predicted * int(config.vocab_size) * 4 * 4
        return int(self.geometry.layers * (states + scores) + logits)
