"""ttt: entries that are trained for one document, first layer by layer, then by the model's predictions.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentcompact.cache import Report, Span
from agentcompact.engines import GIVES_GRADIENTS, question_ids
from agentcompact.errors import CacheFileError
from agentcompact.fitting.attention_statistics import attention_statistics
from agentcompact.fitting.latent_selection import other_rows, preserver_rows, slot_counts
from agentcompact.queries.rollout_prompts import read_prompt_bank
from agentcompact.queries.rollout_store import RolloutStore, rollout_key, rollouts_dir
from agentcompact.queries.rollouts import Rollouts, greedy_answers, teacher_rollouts
from agentcompact.strategies.base import CompactionRequest, Phases, Strategy
from agentcompact.strategies.kvzip_plus import KVzipPlus
from agentcompact.strategies.latent_memory import check_memory, memory_need, peak_bytes
from agentcompact.strategies.latent_settings import BESIDE_THE_RESULT, PRESETS, LatentSettings
from agentcompact.strategies.latent_state import STAGE1, STAGE2, Place, TrainingState
from agentcompact.strategies.latent_training import Training, duration

CURVE_POINTS = 200
"""Points of a loss curve in the report, each the mean of as many updates."""


class LatentCompaction(Strategy):
    """Preservers, anchors and diversifiers of the full cache, trained in two stages with the model frozen.

    Preservers are the entries that KVzip+ ranks highest over all layers and heads; anchors get the most attention from
    teacher rollouts, diversifiers lie farthest from those. Stage 1 fits anchors and diversifiers of each layer to the
    attention outputs and log-normalizers of all entries; stage 2 trains everything by the full cache's predictions.
    Meant for a document that is compacted once and asked often: it costs many times the prefill.
    """

    name = "ttt"
    summary = "trained for one document: attention fitting, then distillation; slow, for caches that are asked often"
    settings_type = LatentSettings
    settings: LatentSettings
    needs = KVzipPlus.needs | {GIVES_GRADIENTS}
    resumable = True

    @property
    def reads_prefill_queries(self) -> bool:
        return False

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        """Select, train and return the entries; with `request.checkpoint` in a file that a later call can go on from.

        Raises MemoryLimitError where it cannot fit, ContextLengthError where prompts and answers have no room behind
        the cache, CacheFileError for a checkpoint of something else.
        """
        settings, device = self.settings, spans[0].keys.device
        bank = read_prompt_bank(settings.prompts_file)
        texts = bank.prompts(settings.schedule.prompts, request.focus)
        prompts = [question_ids(request.engine, request.cache.metadata.prompt, text) for text in texts]
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
                rollouts = self._rollouts(request, prompts, key)
            if state is None:
                state = self._selected(request, spans, rollouts, run, phases)
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

    def _selected(
        self, request: CompactionRequest, spans: Sequence[Span], rollouts: Rollouts, run: str, phases: Phases
    ) -> TrainingState:
        """Return the state before training, which is checkpointed."""
        with phases.phase("scores"):
            scores = reconstruction_scores(request, spans) if self.settings.preserver_share > 0 else None
        with phases.phase("selection"):
            chosen, frozen = self.select(request, spans, rollouts, scores)
        state = TrainingState(chosen, frozen, Place(run=run, seconds=dict(phases.seconds)))
        _save(request, state)
        return state

    def select(
        self,
        request: CompactionRequest,
        spans: Sequence[Span],
        rollouts: Rollouts,
        scores: Sequence[Sequence[Tensor]] | None,
    ) -> tuple[list[Span], list[Tensor]]:
        """Return the chosen entries of each layer in float32, and which of them are preservers (entries,) bool.

        scores: KVzip+ scores per layer and head (n,), or None where there are no preservers.
        """
        settings = self.settings
        both, anchors = slot_counts(request.budget, settings.preserver_share, settings.anchor_share)
        free = [[min(both, n) for n in span.lengths] for span in spans]
        total = request.budget * sum(span.heads for span in spans) - sum(map(sum, free))
        known = scores or [[span.bias.new_zeros(n) for n in span.lengths] for span in spans]
        sparing = settings.initialiser not in ("random", "recent")
        preservers = preserver_rows(known, total, free, spare_first=sparing)
        chosen, frozen = [], []
        for place, (index, _) in enumerate(request.cache.full_layers):
            span, heads, held = spans[place], [], []
            attention = self._attention(request, span, rollouts.queries[index].to(span.keys.device))
            for head, (keys, values, bias, positions) in enumerate(span):
                taken = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
                taken[preservers[place][head].to(keys.device)] = True
                generator = torch.Generator().manual_seed((request.seed * 1_000_003 + index * 1009 + head) % 2**63)
                counts = (free[place][head], min(anchors, free[place][head]))
                others = other_rows(settings.initialiser, keys, attention[head], taken, counts, generator)
                rows = torch.cat([torch.nonzero(taken)[:, 0], others]).sort().values
                kept = taken.clone()
                kept[:1] |= settings.freeze_first
                heads.append((keys[rows].float(), values[rows].float(), bias[rows], positions[rows]))
                held.append(kept[rows] & (not settings.train_preservers))
            chosen.append(Span.from_heads(heads))
            frozen.append(torch.cat(held))
        return chosen, frozen

    def _attention(self, request: CompactionRequest, span: Span, queries: Tensor) -> list[Tensor | None]:
        """Return the highest softmax weight of each entry over the teacher's queries, per head (n,); equation 6."""
        if self.settings.initialiser not in ("mix", "anchors"):
            return [None] * span.heads
        geometry = request.engine.geometry
        pooled = queries.reshape(span.heads, -1, geometry.head_dim)
        found: list[Tensor | None] = []
        for head, (keys, _, bias, _) in enumerate(span):
            if not len(keys):
                found.append(bias)
                continue
            read = (pooled[head : head + 1], keys[None], bias[None])
            found.append(attention_statistics(*read, geometry.scaling, score="max", with_mass=False).score[0])
        return found

    def _measured(self, training: Training) -> dict[str, float]:
        """Return seconds per update and say what this schedule and the paper's will take; nothing without training."""
        schedule, place = self.settings.schedule, training.state.place
        if schedule.stage1_updates + schedule.stage2_updates == 0 or place.stage not in (STAGE1, STAGE2):
            return {}
        with training.phases.phase("estimate"):
            each = training.seconds_per_update()
        if training.request.progress is not None:
            asked = schedule.stage1_updates * each[STAGE1] + schedule.stage2_updates * each[STAGE2]
            paper = PRESETS["paper"].stage1_updates * each[STAGE1] + PRESETS["paper"].stage2_updates * each[STAGE2]
            training.request.progress(
                f"training: about {duration(asked)} for {schedule.stage1_updates:,} and {schedule.stage2_updates:,} "
                f"updates (the paper's schedule: {duration(paper)})", 0, 1
            )  # fmt: skip
        return each

    def _facts(self, training: Training, measured: dict[str, float]) -> dict[str, Any]:
        """Return what the report says of the training."""
        schedule, place = self.settings.schedule, training.state.place
        prompts = len(training.rollouts.items)
        facts: dict[str, Any] = {
            "prompts": prompts,
            "stage1_updates": schedule.stage1_updates,
            "stage2_updates": schedule.stage2_updates,
            "rollout_tokens": sum(len(item.tokens) for item in training.rollouts.items),
            "query_bytes": training.rollouts.query_bytes,
            "losses": {stage: curve(losses) for stage, losses in place.losses.items() if losses},
        }
        if measured:
            paper = PRESETS["paper"]
            facts["seconds_per_update"] = measured
            facts["paper_seconds_of_updates"] = (
                paper.stage1_updates * measured[STAGE1] + paper.stage2_updates * measured[STAGE2]
            )
        return facts


def reconstruction_scores(request: CompactionRequest, spans: Sequence[Span]) -> list[list[Tensor]]:
    """Return the KVzip+ scores of all entries, per layer and head (n,)."""
    scorer = KVzipPlus()
    captured = scorer.find_queries(request)
    scores = []
    for place, (index, _) in enumerate(request.cache.full_layers):
        scores.append(scorer.score_layer(request, index, spans[place], captured))
        if request.progress is not None:
            request.progress("scores", place + 1, len(spans))
    return scores


def run_key(rollouts: str, request: CompactionRequest, settings: LatentSettings) -> str:
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
