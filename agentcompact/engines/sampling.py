"""Choosing the next token, and knowing when an answer ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentcompact.engines.base import Generation
from agentcompact.models import LoadedModel
from agentcompact.settings import SamplingSettings

COLDEST = 1e-5
"""Below this temperature scores divided by it may overflow, and the draw is the highest anyway."""


class Sampler:
    """Picks a token for each row of logits: the highest at temperature 0, a seeded draw otherwise."""

    def __init__(self, settings: SamplingSettings, device: torch.device) -> None:
        self.settings = settings
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        self.warpers = LogitsProcessorList()
        if settings.temperature > 0 and settings.temperature != 1.0:
            self.warpers.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_k:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))

    def __call__(self, logits: Tensor) -> Tensor:
        """(batch, vocabulary) -> (batch,)."""
        if self.settings.temperature < COLDEST:
            return logits.argmax(dim=-1)
        probabilities = self.warpers(None, logits).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]


class StopWatch:
    """Collects the tokens of several answers and ends each at an end token, a stop string or the limit."""

    def __init__(self, tokenizer: Any, settings: SamplingSettings, end_ids: set[int], count: int) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.end_ids = end_ids
        self.generations = [Generation("") for _ in range(count)]

    def add(self, index: int, token: int) -> bool:
        """Give one answer its next token; return whether it goes on. The end token is no part of the answer."""
        generation = self.generations[index]
        if token in self.end_ids:
            return self._end(index, "eos")
        generation.token_ids.append(token)
        if self.settings.stop:
            text = self._text(generation)
            begun = len(text) - len(text.lstrip())  # a stop string before the answer's first word ends nothing
            found = [place for place in (text.find(stop, begun) for stop in self.settings.stop) if place >= 0]
            if found:
                generation.text, generation.finish_reason = text[: min(found)], "stop"
                return False
        if len(generation.token_ids) >= self.settings.max_new_tokens:
            return self._end(index, "length")
        return True

    def shown(self, index: int) -> bool:
        """Whether the last token given belongs to the answer's text."""
        return self.generations[index].finish_reason not in ("eos", "stop")

    def _end(self, index: int, reason: str) -> bool:
        generation = self.generations[index]
        generation.text, generation.finish_reason = self._text(generation), reason
        return False

    def _text(self, generation: Generation) -> str:
        text: str = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        return text


def end_token_ids(model: LoadedModel) -> set[int]:
    """Return the ids that end an answer: the generation settings' and the tokenizer's."""
    ids: set[int] = set()
    for value in (
        getattr(model.causal_lm.generation_config, "eos_token_id", None),
        model.tokenizer.eos_token_id,
    ):
        ids.update([value] if isinstance(value, int) else value or [])
    return ids
