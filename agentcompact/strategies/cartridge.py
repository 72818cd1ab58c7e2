"""cartridge: the text's first entries, trained to answer the model's own questions as the full cache does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from agentcompact.cache import Report, Span
from agentcompact.queries.rollouts import Rollouts
from agentcompact.queries.self_study import Study, self_study_pairs
from agentcompact.strategies.base import CompactionRequest, Phases
from agentcompact.strategies.latent_settings import DistillationSettings
from agentcompact.strategies.trained import TrainedCompaction


class CartridgeSettings(DistillationSettings):
    prompts: int = Field(
        96, ge=1, description="requests of self-study; those for a question are followed by the question"
    )
    stage2_updates: int = Field(1000, ge=0, description="updates of end-to-end distillation")
    answer_tokens: int = Field(64, ge=1, description="most tokens of one answer")
    pool: int = Field(1, ge=1, description="query positions kept; nothing is made of them here")
    biases: bool = Field(False, description="train biases; the method has none")
    cross_entropy: bool = Field(False, description="add the cross-entropy of the teacher's tokens")


class Cartridge(TrainedCompaction):
    """The first entries of each head, trained by distillation on self-study alone, without a stage 1.

    A baseline: a compact cache initialised from the beginning of the text. Source: Cartridges (Eyuboglu et al. 2025);
    the loss is the grouped divergence of `ttt`'s stage 2, or that over the whole vocabulary with full_vocabulary.
    """

    name = "cartridge"
    summary = "the first entries, trained by self-study distillation alone; slow, a baseline for ttt"
    settings_type = CartridgeSettings
    settings: CartridgeSettings

    def requests(self, request: CompactionRequest) -> list[list[int]]:
        study = Study(self.settings.prompts, self.settings.answer_tokens, focus=request.focus)
        pairs = self_study_pairs(request.engine, request.cache, request.seed, request.progress, study)
        return [prompt for prompt, _ in pairs]

    def selection(
        self, request: CompactionRequest, spans: Sequence[Span], rollouts: Rollouts, phases: Phases, report: Report
    ) -> tuple[list[Span], list[Tensor]]:
        with phases.phase("selection"):
            first = slice(0, request.budget)
            chosen = [
                Span.from_heads([(k[first].float(), v[first].float(), b[first], p[first]) for k, v, b, p in span])
                for span in spans
            ]
        return chosen, [torch.zeros(span.entries, dtype=torch.bool, device=span.keys.device) for span in chosen]
