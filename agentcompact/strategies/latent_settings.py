"""The settings of latent compaction, and the schedules that its presets stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from pydantic import Field

from agentcompact.fitting.attention_fitting import FitOptions
from agentcompact.fitting.latent_selection import Initialiser
from agentcompact.queries.rollouts import POOL, TOP
from agentcompact.strategies.base import StrategySettings

Preset = Literal["init", "fast", "paper"]


@dataclass(frozen=True)
class Schedule:
    """What a preset stands for.

    prompts: rollouts, or None for the whole bank. Then the updates of both stages, and the learning rate of the second.
    recitation: share of the training in which the text itself is repeated. initialiser: what training begins with.
    """

    prompts: int | None
    stage1_updates: int
    stage2_updates: int
    stage2_rate: float = 1e-4
    recitation: float = 0.0
    initialiser: Initialiser = "mix"

    def seconds(self, each: Mapping[str, float]) -> float:
        """Return the seconds of all updates, given those of one update of each stage, by its name."""
        return self.stage1_updates * each.get("stage 1", 0.0) + self.stage2_updates * each.get("stage 2", 0.0)


PRESETS: dict[Preset, Schedule] = {
    "init": Schedule(48, 0, 0),
    "fast": Schedule(96, 300, 60, 1e-3, 0.5, "attention_matching"),
    "paper": Schedule(None, 1000, 1000),
}
"""init: the published selection alone, by the queries of 48 rollouts. paper: the published schedule, all 480 prompts.
fast: not published; it begins with a better cache and trains on the text as well."""


class DistillationSettings(StrategySettings):
    """What every strategy that distils the full cache's predictions can be told."""

    prompts: int | None = Field(None, ge=1, description="requests that the full cache answers [by preset]")
    stage2_updates: int | None = Field(None, ge=0, description="updates of end-to-end distillation [by preset]")
    answer_tokens: int = Field(24, ge=1, description="most tokens of one rollout's answer")
    rollout_batch: int = Field(32, ge=1, description="rollouts generated together over one shared span")
    pool: int = Field(POOL, ge=1, description="query positions kept of all rollouts, evenly spaced")
    stage2_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="learning rate of stage 2 [1e-4, or by preset]"
    )
    stage2_rollouts: int = Field(4, ge=1, description="rollouts of one update of stage 2, read as one padded batch")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="AdamW's decay towards 0")
    clip: float = Field(1.0, gt=0, description="largest norm of stage 2's gradient over all entries")
    biases: bool = Field(True, description="train biases; otherwise they stay as they are")
    top: int = Field(TOP, ge=1, description="likeliest tokens of the teacher that count one by one in stage 2")
    full_vocabulary: bool = Field(
        False, description="distil the whole vocabulary, asking the full cache again at each update"
    )
    cross_entropy: bool = Field(True, description="add the cross-entropy of the teacher's tokens to stage 2")
    checkpoint_every: int = Field(
        50, ge=1, description="updates between two checkpoints, which are 5 seconds apart at least"
    )
    keep_rollouts: bool = Field(True, description="keep rollouts on disk for other ratios of the same document")
    memory_gib: float | None = Field(
        None, gt=0, description="memory that may be used, in GiB; otherwise what the system says is free"
    )

    @property
    def schedule(self) -> Schedule:
        """How much work it is."""
        return self._over(Schedule(None, 0, 0))

    def _over(self, schedule: Schedule) -> Schedule:
        """Return a schedule with what was set beside it."""
        own = {each.name: getattr(self, each.name, None) for each in fields(Schedule)}
        return replace(schedule, **{name: value for name, value in own.items() if value is not None})

    @property
    def full_schedule(self) -> Schedule:
        """The published schedule, whose cost is told beside that of the one asked for."""
        return self.schedule

    @property
    def fit_options(self) -> FitOptions | None:
        """How stage 1 trains; None where there is none."""
        return None


class LatentSettings(DistillationSettings):
    preset: Preset = Field(
        "paper",
        description="init: selection only, 48 prompts; fast: 96 prompts, 300 and 60 updates, from attention_matching's "
        "entries, half of it repeating the text; paper: 480 prompts and 1,000 updates of each stage, as published",
    )
    stage1_updates: int | None = Field(None, ge=0, description="updates of attention fitting a layer [by preset]")
    prompts_file: str | None = Field(
        None, description="JSON with your own requests and instructions, instead of the built-in bank"
    )
    preserver_share: float = Field(0.75, ge=0, le=1, description="share of the budget that goes to preservers")
    anchor_share: float = Field(0.25, ge=0, le=1, description="share of anchors among anchors and diversifiers")
    initialiser: Initialiser | None = Field(
        None,
        description="what the entries beside the preservers begin as: mix, anchors, diversifiers, random, recent; or "
        "attention_matching, whose entries take the place of all, preservers too [by preset]",
    )
    stage1_rate: float = Field(3e-3, gt=0, allow_inf_nan=False, description="learning rate of stage 1")
    stage1_queries: int = Field(128, ge=1, description="query positions of one update of stage 1")
    match_mass: bool = Field(True, description="fit log-normalizers in stage 1, beside outputs")
    recitation: float | None = Field(
        None, ge=0, le=1, description="share of training in which the text itself is repeated [by preset]"
    )
    preserver_score: Literal["kvzip_plus", "kvzip"] = Field("kvzip_plus", description="what ranks the preservers")
    train_preservers: bool = Field(False, description="let stage 1 change preservers too")
    freeze_first: bool = Field(False, description="keep the first entry of each head as it is in stage 1")

    @property
    def schedule(self) -> Schedule:
        """The preset's schedule, with what was set beside it."""
        return self._over(PRESETS[self.preset])

    @property
    def full_schedule(self) -> Schedule:
        return PRESETS["paper"]

    @property
    def fit_options(self) -> FitOptions | None:
        return FitOptions(self.stage1_queries, self.stage1_rate, self.weight_decay, self.match_mass, self.biases)


BESIDE_THE_RESULT = {"checkpoint_every", "keep_rollouts", "memory_gib"}
"""Settings that a run may change when it goes on from a checkpoint, since they change nothing in the cache."""
