"""The two stages of a latent compaction over a training state, from wherever that stands.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026), sections 3.3, 3.4 and appendix A.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.cache import Span
from agentcompact.durations import TimeLeft
from agentcompact.errors import SettingsError
from agentcompact.fitting.adamw import adamw, moments, restore_moments
from agentcompact.fitting.attention_fitting import AttentionFit, attention_targets, sample_rows, seeded
from agentcompact.fitting.distillation import full_divergence, grouped_divergence, rollout_loss
from agentcompact.queries.rollouts import Rollout, Rollouts
from agentcompact.strategies.base import CompactionRequest, Phases
from agentcompact.strategies.latent_settings import DistillationSettings
from agentcompact.strategies.latent_state import DONE, STAGE1, STAGE2, Stage, TrainingState, interrupts_deferred

CHECKPOINT_SECONDS = 5.0
"""Checkpoints within a stage are at least this far apart: an update may take less time than writing one."""
GROUP_BYTES = 1 << 30
"""Bytes of queries and targets that are held for the layers trained together; one layer on a CPU."""


@dataclass
class Training:
    """One compaction's training: what to train by, the state, and how to keep it.

    full: all entries of each full layer's span. save: writes the checkpoint, where one was asked for.
    """

    request: CompactionRequest
    settings: DistillationSettings
    rollouts: Rollouts
    full: Sequence[Span]
    state: TrainingState
    phases: Phases
    save: Callable[[], None]

    @property
    def groups(self) -> list[range]:
        """Places of the full layers that stage 1 trains together."""
        geometry, count = self.request.engine.geometry, len(self.full)
        if self.full[0].keys.device.type == "cpu":
            return [range(place, place + 1) for place in range(count)]
        positions = next(iter(self.rollouts.queries.values())).shape[1]
        each = geometry.query_heads * positions * geometry.head_dim * 8
        size = max(1, GROUP_BYTES // each)
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def run(self) -> None:
        """Go on from where the state stands to the end. Ctrl-C ends it after an update, with a checkpoint."""
        place = self.state.place
        if place.stage == STAGE1:
            with self.phases.phase(STAGE1):
                self._run_stage1()
            self._go_on(STAGE2)
        if place.stage == STAGE2:
            with self.phases.phase(STAGE2):
                self._run_stage2()
            self._go_on(DONE)

    def _go_on(self, stage: Stage) -> None:
        self.state.advance(stage)
        self._keep(0.0)

    def _run_stage1(self) -> None:
        place, updates = self.state.place, self.settings.schedule.stage1_updates
        groups = self.groups
        clock = Clock(STAGE1, (len(groups) - place.group) * updates - place.update, self.request)
        for number in range(place.group, len(groups) if updates else 0):
            fit = self.stage1_fit(groups[number], updates)
            restore_moments(fit.optimiser, self.state.moments)
            share = len(groups[number]) / len(self.full)

            def hold(update: int, fit: AttentionFit = fit, number: int = number) -> None:
                self._take(groups[number], fit)
                self.state.moments = moments(fit.optimiser)
                self.state.advance(STAGE1, number, update)

            def step(update: int, fit: AttentionFit = fit, share: float = share) -> float:
                loss = fit.step(update)
                self._note_stage1(update, loss * share)
                return loss

            self._updates(place.update, updates, step, hold, clock)
            self._take(groups[number], fit)
            self.state.advance(STAGE1, number + 1)

    def _note_stage1(self, update: int, loss: float) -> None:
        """Add a group's share of the mean loss over layers."""
        losses = self.state.place.losses[STAGE1]
        if update < len(losses):
            losses[update] += loss
        else:
            losses.append(loss)

    def _run_stage2(self) -> None:
        updates = self.settings.schedule.stage2_updates
        if not updates:
            return
        spans = self.trainable_spans()
        trained = self._stage2_parameters(spans)
        optimiser = adamw(trained, self.settings.schedule.stage2_rate, self.settings.weight_decay)
        restore_moments(optimiser, self.state.moments)
        picks = self.stage2_picks(updates)

        def hold(update: int) -> None:
            self.state.spans = [_detached(span) for span in spans]
            self.state.moments = moments(optimiser)
            self.state.advance(STAGE2, 0, update)

        def step(update: int) -> float:
            loss = self.stage2_gradient(spans, trained, picks[update])
            torch.nn.utils.clip_grad_norm_(trained, self.settings.clip)
            optimiser.step()
            self.state.place.losses[STAGE2].append(loss)
            return loss

        first = self.state.place.update
        self._updates(first, updates, step, hold, Clock(STAGE2, updates - first, self.request))
        self.state.spans = [_detached(span) for span in spans]

    def _updates(
        self,
        first: int,
        updates: int,
        step: Callable[[int], float],
        hold: Callable[[int], None],
        clock: Clock,
    ) -> None:
        """Make the updates from `first` on, with a checkpoint every so many and before an interruption."""
        with interrupts_deferred() as interrupted:
            for update in range(first, updates):
                loss = step(update)
                clock.tell(loss)
                done = update + 1
                if interrupted():
                    hold(done)
                    self._keep(clock.elapsed)
                    raise KeyboardInterrupt
                due = done % self.settings.checkpoint_every == 0 and clock.since_kept >= CHECKPOINT_SECONDS
                if due and self.request.checkpoint is not None and done < updates:
                    hold(done)
                    clock.kept()
                    self._keep(clock.elapsed)

    def _keep(self, elapsed: float) -> None:
        """Write the checkpoint; elapsed: seconds of the stage that `phases` does not know yet."""
        place = self.state.place
        place.seconds = dict(self.phases.seconds)
        if elapsed:
            place.seconds[place.stage] = place.seconds.get(place.stage, 0.0) + elapsed
        self.save()

    def _take(self, places: range, fit: AttentionFit) -> None:
        """Put a fit's entries into the state."""
        made = iter(fit.entries())
        for place in places:
            span = self.state.spans[place]
            filled = [next(made) if len(head[0]) else head[:3] for head in span]
            keys, values, bias = (torch.cat([head[part] for head in filled]) for part in range(3))
            self.state.spans[place] = Span(keys, values, bias, span.positions, span.offsets)

    def stage1_fit(self, places: range, updates: int) -> AttentionFit:
        """Return the fit of a group of layers as the state has them. Heads without entries take no part."""
        geometry, seed, options = self.request.engine.geometry, self.request.seed, self.settings.fit_options
        if options is None:
            raise SettingsError("this strategy has no stage 1")
        queries, heads, entries, frozen, samples = [], [], [], [], []
        rollouts = self.rollouts
        for place in places:
            index, span = geometry.full_layers[place], self.state.spans[place]
            pool = rollouts.queries[index].to(span.keys.device)
            pool = pool.view(geometry.kv_heads, geometry.group, *pool.shape[1:])
            positions = pool.shape[2]
            count = min(options.queries, positions)
            drawn = self._sample(seeded(seed, index), updates, count, positions, rollouts.recited_positions)
            for head in range(geometry.kv_heads):
                if not span.lengths[head]:
                    continue
                queries.append(pool[head])
                heads.append(self.full[place].head(head)[:3])
                entries.append(span.head(head)[:3])
                frozen.append(self.state.frozen[place][span.offsets[head] : span.offsets[head + 1]])
                samples.append(drawn)
        stacked = torch.stack(queries)
        return AttentionFit(
            stacked,
            attention_targets(stacked, heads, geometry.scaling),
            entries,
            frozen,
            torch.stack(samples, dim=1),
            geometry.kv_heads,
            geometry.scaling,
            options,
        )

    def trainable_spans(self) -> list[Span]:
        """Return the state's spans with leaves that require gradients: every entry, preservers too."""
        return [
            Span(
                span.keys.clone().requires_grad_(),
                span.values.clone().requires_grad_(),
                span.bias.clone().requires_grad_(),
                span.positions,
                span.offsets,
            )
            for span in self.state.spans
        ]

    def _stage2_parameters(self, spans: Sequence[Span]) -> list[Tensor]:
        parts = [[span.keys, span.values] + ([span.bias] if self.settings.biases else []) for span in spans]
        return [tensor for part in parts for tensor in part]

    def stage2_picks(self, updates: int) -> list[list[int]]:
        """Return which rollouts each update reads, drawn with replacement by the seed."""
        rollouts, generator = self.rollouts, seeded(self.request.seed, 999_983)
        drawn = self._sample(generator, updates, self.settings.stage2_rollouts, len(rollouts.items), rollouts.recited)
        picks: list[list[int]] = drawn.tolist()
        return picks

    def _sample(self, generator: torch.Generator, updates: int, count: int, rows: int, recited: int) -> Tensor:
        """Return the rows of each update, of which the recited ones have their share."""
        return sample_rows(generator, updates, count, rows, recited, self.settings.schedule.recitation)

    def stage2_gradient(self, spans: Sequence[Span], trained: Sequence[Tensor], picks: Sequence[int]) -> float:
        """Set the gradients of one update; return its loss."""
        with torch.enable_grad():
            loss = self.stage2_loss(spans, [self.rollouts.items[pick] for pick in picks])
            gradients = torch.autograd.grad(loss, list(trained), allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        return float(loss.detach())

    def stage2_loss(self, spans: Sequence[Span], items: Sequence[Rollout]) -> Tensor:
        """Return the mean loss of some rollouts behind a cache of these spans, read as one batch (equation 13)."""
        request, settings = self.request, self.settings
        student = request.cache.replaced(spans, request.start, request.end)
        turns = [(item.prompt, item.tokens) for item in items]
        logits = request.engine.forced_logits(student, turns)
        teacher: list[Tensor] = []
        if settings.full_vocabulary:
            with torch.no_grad():
                teacher = request.engine.forced_logits(request.cache, turns)
        losses = []
        for number, (each, item) in enumerate(zip(logits, items, strict=True)):
            if settings.full_vocabulary:
                divergence = full_divergence(each, teacher[number])
            else:
                ids, known = item.top_ids.to(each.device), item.top_log_probabilities.to(each.device)
                divergence = grouped_divergence(each, ids, known)
            tokens = torch.tensor(item.tokens, device=each.device)
            losses.append(rollout_loss(each, tokens, divergence, cross_entropy=settings.cross_entropy))
        return torch.stack(losses).mean()

    def seconds_per_update(self) -> dict[str, float]:
        """Return the seconds that an update of each stage takes, on copies; one of stage 1 is of all layers."""
        each: dict[str, float] = {}
        if self.settings.fit_options is not None:
            fit = self.stage1_fit(self.groups[0], 2)
            fit.step(0)
            begun = time.perf_counter()
            fit.step(1)
            each[STAGE1] = (time.perf_counter() - begun) * len(self.groups)
        spans = self.trainable_spans()
        begun = time.perf_counter()
        self.stage2_gradient(spans, self._stage2_parameters(spans), self.stage2_picks(1)[0])
        each[STAGE2] = time.perf_counter() - begun
        return each


class Clock:
    """Tells the progress of a stage, with its loss and the time left."""

    def __init__(self, name: str, steps: int, request: CompactionRequest) -> None:
        self._name, self._steps, self._request = name, steps, request
        self._left, self._done = TimeLeft(), 0
        self._kept = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the stage was begun or taken up."""
        return self._left.elapsed

    @property
    def since_kept(self) -> float:
        """Seconds since the last checkpoint of the stage, or its beginning."""
        return self.elapsed - self._kept

    def kept(self) -> None:
        """Note that a checkpoint is written now."""
        self._kept = self.elapsed

    def tell(self, loss: float) -> None:
        """Count one update."""
        self._done += 1
        if self._request.progress is not None:
            left = self._left.after(self._done, self._steps)
            self._request.progress(f"{self._name} · loss {loss:.4g}, {left}", self._done, self._steps)


def _detached(span: Span) -> Span:
    keys, values, bias = (part.detach().clone() for part in (span.keys, span.values, span.bias))
    return Span(keys, values, bias, span.positions, span.offsets)
