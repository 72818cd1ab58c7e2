"""What the strategies share whose entries are trained for one document: rollouts, training, checkpoints, the report."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from agentcompact.cache import Report, Span
from agentcompact.durations import duration
from agentcompact.engines import CAPTURES_QUERIES, GIVES_GRADIENTS
from agentcompact.errors import CacheFileError
from agentcompact.queries.recitation import recitations
from agentcompact.queries.rollout_store import RolloutStore, rollout_key, rollouts_dir
from agentcompact.queries.rollouts import Rollouts, greedy_answers, teacher_rollouts
from agentcompact.strategies.base import CompactionRequest, Phases, Strategy
from agentcompact.strategies.latent_memory import check_memory, memory_need, peak_bytes
from agentcompact.strategies.latent_settings import BESIDE_THE_RESULT, DistillationSettings
from agentcompact.strategies.latent_state import STAGE1, STAGE2, Place, TrainingState
from agentcompact.strategies.latent_training import Training

CURVE_POINTS = 200
"""Points of a loss curve in the report, each the mean of as many updates."""


class TrainedCompaction(Strategy):
    """Base of the strategies that select entries, and train them by what the full cache answers to requests."""

    settings_type = DistillationSettings
    settings: DistillationSettings
    needs = frozenset({CAPTURES_QUERIES, GIVES_GRADIENTS})
    resumable = True
    trains = True

    @abstractmethod
    def requests(self, request: CompactionRequest) -> list[list[int]]:
        """Return the token ids of the requests that the full cache answers."""

    @abstractmethod
    def selection(
        self, request: CompactionRequest, spans: Sequence[Span], rollouts: Rollouts, phases: Phases, report: Report
    ) -> tuple[list[Span], list[Tensor]]:
        """Return the entries that training begins with, in float32, and which of each layer stage 1 leaves alone."""

    @property
    def reads_prefill_queries(self) -> bool:
        return False

    @property
    def takes_focus(self) -> bool:
        return True

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        """Select, train and return the entries; with `request.checkpoint` in a file that a later call can go on from.

        Raises MemoryLimitError where it cannot fit, ContextLengthError where prompts and answers have no room behind
        the cache, CacheFileError for a checkpoint of something else.
        """
        settings, device = self.settings, spans[0].keys.device
        with request.engine.counters.as_compaction(), phases.phase("requests"):
            prompts = self.requests(request)
        longest = max(len(prompt) for prompt in prompts)
        request.engine.check_room(request.cache.next_position, longest, settings.answer_tokens)
        need = memory_need(request, spans, settings, prompts)
        check_memory(need, settings, device)
        key = rollout_key(request.cache, prompts, settings.answer_tokens, settings.top, settings.pool)
        run = run_key(key, request, settings)
        state = self._resumed(request, spans, run)
        if state is not None:
            phases.seconds.update(state.place.seconds)
        with request.engine.counters.as_compaction():
            with phases.phase("rollouts"):
                rollouts = self._rollouts(request, prompts, key).joined(self._recitations(request))
            if state is None:
                state = self._selected(request, spans, rollouts, run, phases, report)
            training = Training(request, settings, rollouts, spans, state, phases, lambda: _save(request, state))
            measured = self._measured(training)
            training.run()
        report.training = {
            **self._facts(training, measured),
            "estimated_bytes": need.peak,
            "process_peak_bytes": peak_bytes(device),
        }
        return [
            Span(span.keys.to(full.keys.dtype), span.values.to(full.values.dtype), span.bias.float(), span.positions,
                 span.offsets)
            for span, full in zip(state.spans, spans, strict=True)
        ]  # fmt: skip

    def _is_enough(self, request: CompactionRequest, spans: Sequence[Span]) -> bool:
        return sum(span.entries for span in spans) <= request.budget * sum(span.heads for span in spans)

    def _resumed(self, request: CompactionRequest, spans: Sequence[Span], run: str) -> TrainingState | None:
        """Return what the checkpoint holds, if there is one to go on from."""
        path = request.checkpoint
        if path is None or not path.exists():
            return None
        if not request.resume:
            raise CacheFileError(
                f"{path} holds an interrupted compaction: go on with --resume (resume=True), or remove it"
            )
        return TrainingState.load(path, run, list(spans))

    def _rollouts(self, request: CompactionRequest, prompts: list[list[int]], key: str) -> Rollouts:
        """Return the teacher's rollouts, kept ones where there are."""
        settings = self.settings
        store = RolloutStore(rollouts_dir() if settings.keep_rollouts else None, key)
        found = store.load()
        if found is not None:
            return found
        answers = greedy_answers(
            request.engine,
            request.cache,
            prompts,
            settings.answer_tokens,
            settings.rollout_batch,
            request.progress,
            store.load_answers(),
            store.save_answers,
        )
        made = teacher_rollouts(
            request.engine, request.cache, answers, top=settings.top, pool=settings.pool, progress=request.progress
        )
        store.save(made)
        return made

    def _recitations(self, request: CompactionRequest) -> Rollouts:
        """Return the rollouts in which the compacted text is repeated; none where they have no share."""
        settings = self.settings
        if settings.schedule.recitation == 0:
            return Rollouts([], {})
        answers = recitations(request.engine, request.cache, request.start, request.end)
        return teacher_rollouts(
            request.engine,
            request.cache,
            answers,
            top=settings.top,
            pool=settings.pool,
            progress=request.progress,
        )

    def _selected(
        self,
        request: CompactionRequest,
        spans: Sequence[Span],
        rollouts: Rollouts,
        run: str,
        phases: Phases,
        report: Report,
    ) -> TrainingState:
        """Return the state before training, which is checkpointed."""
        chosen, frozen = self.selection(request, spans, rollouts, phases, report)
        state = TrainingState(chosen, frozen, Place(run=run, seconds=dict(phases.seconds)))
        _save(request, state)
        return state

    def _measured(self, training: Training) -> dict[str, float]:
        """Return seconds per update and say what this schedule and the paper's will take; nothing without training."""
        schedule, place = self.settings.schedule, training.state.place
        if schedule.stage1_updates + schedule.stage2_updates == 0 or place.stage not in (STAGE1, STAGE2):
            return {}
        with training.phases.phase("estimate"):
            each = training.seconds_per_update()
        if training.request.progress is not None:
            asked, paper = schedule.seconds(each), self.settings.full_schedule.seconds(each)
            training.request.progress(
                f"training: about {duration(asked)} for {schedule.stage1_updates:,} and {schedule.stage2_updates:,} "
                f"updates (the paper's schedule: {duration(paper)})", 0, 1
            )  # fmt: skip
        return each

    def _facts(self, training: Training, measured: dict[str, float]) -> dict[str, Any]:
        """Return what the report says of the training."""
        schedule, place = self.settings.schedule, training.state.place
        facts: dict[str, Any] = {
            "prompts": len(training.rollouts.items) - training.rollouts.recited,
            "recitations": training.rollouts.recited,
            "stage1_updates": schedule.stage1_updates,
            "stage2_updates": schedule.stage2_updates,
            "rollout_tokens": sum(len(item.tokens) for item in training.rollouts.items),
            "query_bytes": training.rollouts.query_bytes,
            "losses": {stage: curve(losses) for stage, losses in place.losses.items() if losses},
        }
        if measured:
            facts["seconds_per_update"] = measured
            facts["paper_seconds_of_updates"] = self.settings.full_schedule.seconds(measured)
        return facts


def run_key(rollouts: str, request: CompactionRequest, settings: DistillationSettings) -> str:
    """Return what the result of a compaction depends on as 32 hexadecimal digits."""
    facts = [
        rollouts,
        request.budget,
        request.start,
        request.end,
        request.seed,
        settings.model_dump(mode="json", exclude=BESIDE_THE_RESULT),
    ]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def curve(losses: Sequence[float]) -> list[float]:
    """Return the losses, or the means of as many equal parts as a curve has points."""
    size = max(1, -(-len(losses) // CURVE_POINTS))
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    return [float(f"{sum(part) / len(part):.6g}") for part in parts]


def _save(request: CompactionRequest, state: TrainingState | None) -> None:
    if request.checkpoint is not None and state is not None:
        state.save(request.checkpoint)
