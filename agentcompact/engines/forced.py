"""Reading given continuations behind a cache, with gradients to its entries where they ask for some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.engines.prompt_batch import padded_rows
from agentcompact.errors import DocumentError

if TYPE_CHECKING:
    from agentcompact.engines.base import EngineCounters
    from agentcompact.models import LoadedModel, ModelGeometry

Observer = Callable[[int, Tensor], None]
"""Called with a full layer's index and its queries (rows, query_heads, tokens, head_dim), before they attend."""


class ForcedReading(ABC):
    """What `TransformersEngine` does with continuations that are given.

    Rows are padded on the left, so that continuations end together and logits are made of few positions but theirs: the
    vocabulary is a fifth of a small model's work, and more.
    """

    model: LoadedModel
    geometry: ModelGeometry
    counters: EngineCounters

    @abstractmethod
    def check_room(self, start: int, tokens: int, more: int = 0) -> None:
        """Raise ContextLengthError where so many tokens, and more, have no room behind `start` positions."""

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
        fed = 1 if observer is not None else 0
        rows = [[*prompt, *answer[: len(answer) - 1 + fed]] for prompt, answer in turns]
        longest, start = max(len(row) for row in rows), cache.next_position
        self.check_room(start, longest)
        ids, padding, seen = padded_rows(rows, start, self.model.device)
        positions = torch.arange(start, start + longest, device=ids.device)[None] - padding[:, None]
        behind = cache.fork(batch_size=len(rows))
        if seen is not None:
            behind.set_gaps(start, padding)
        watching = nullcontext() if observer is None else behind.observed(observer)
        with watching:
            output = self.model.causal_lm(
                input_ids=ids,
                cache=behind,
                position_ids=positions.clamp(min=0),
                attention_mask=seen,
                use_cache=True,
                logits_to_keep=max(len(answer) for _, answer in turns) + fed,
            )
        self.counters.prefilled_tokens += sum(len(row) for row in rows)
        wide = torch.promote_types(output.logits.dtype, torch.float32)
        end = output.logits.shape[1] - fed
        return [output.logits[row, end - len(answer) : end].to(wide) for row, (_, answer) in enumerate(turns)]

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
