"""The training loop: examples by number, so that a run that was interrupted goes on as if it had not been."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.cache.digest import tensors_digest
from agentcompact.engines import GIVES_GRADIENTS, ROTATES_STATES, TransformersEngine
from agentcompact.errors import TrainingError
from agentcompact.files import atomic_output
from agentcompact.training.checkpoint import FILE_NAME as CHECKPOINT
from agentcompact.training.checkpoint import load_checkpoint, save_checkpoint, take_over
from agentcompact.training.forward import check_forward
from agentcompact.training.objective import attention_loss, continuation_loss, written_cache
from agentcompact.training.settings import TrainingSettings
from agentcompact.training.teacher import Teacher, TeacherStore
from agentcompact.training.windows import Corpus, Cue, Window
from agentcompact.writers import FastDiamond, WriterRecord, load_writer, save_writer
from agentcompact.writers.file import FILE_NAME as WRITER

LOG = "log.jsonl"
PLOT = "loss.png"
RECENT = 20
"""Updates that the time left is estimated from."""
CONTINUATION_COST = 3.0
"""What an example on continuations costs, measured in examples on attention outputs."""
ANCHORS = 4
"""Contexts whose first entries the first latents begin with."""


@dataclass(frozen=True)
class TrainingStep:
    """Where a run is. loss: of the last update; held_out: the latest measured, None before the first."""

    update: int
    total: int
    phase: str
    loss: float
    held_out: float | None
    tokens_per_second: float
    seconds_left: float

    @property
    def line(self) -> str:
        held = "" if self.held_out is None else f", held-out {self.held_out:.4f}"
        return f"{self.phase}: loss {self.loss:.4f}{held}, {self.tokens_per_second:,.0f} tokens/s"


class TrainingStopped(Exception):  # noqa: N818 - it is no error: the run goes on later
    """The run was asked to stop; its checkpoint is written."""


class Trainer:
    """Trains a writer for one model on one corpus, into a folder.

    The folder gets `writer.safetensors`, `checkpoint.safetensors`, `log.jsonl` and, where matplotlib is installed,
    `loss.png`; teacher caches lie in `teacher_folder`, at most `teacher_bytes` of them. A folder that holds a
    checkpoint is resumed. Source: appendix A, table 2, and section 2, equation 2.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        corpus: Corpus,
        settings: TrainingSettings,
        output: Path,
        *,
        teacher_folder: Path | None = None,
        teacher_bytes: int = 8 << 30,
        start_from: Path | None = None,
        report: Callable[[TrainingStep], None] = lambda _: None,
    ) -> None:
        """start_from: a writer to begin with, instead of an untrained one; the folder of a run gives its optimiser's
        moments too, where this run has no updates on attention outputs.

        Raises TrainingError where the folder holds a run with other settings, another corpus or model, or the writer
        to begin with does not fit.
        """
        if not {GIVES_GRADIENTS, ROTATES_STATES} <= engine.capabilities:
            raise TrainingError("this engine gives no gradients: train with the transformers engine")
        check_forward(engine.model, engine.new_cache())
        engine.check_room(0, settings.context, settings.cue + settings.continuation)
        output.mkdir(parents=True, exist_ok=True)
        self.engine, self.corpus, self.settings, self.output, self.report = engine, corpus, settings, output, report
        self.record = WriterRecord.of_model(settings.writer, engine.describe(), engine.geometry)
        self.writer = self._first_writer(start_from).to(engine.model.device)
        self.optimiser = torch.optim.AdamW(self.writer.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999))
        store = TeacherStore(teacher_folder or output / "teacher", teacher_bytes)
        self.teacher = Teacher(engine, store, attention=settings.reads_attention)
        self.update = 0
        self.log: list[dict[str, Any]] = []
        self._recent: dict[str, deque[float]] = {}
        if (output / CHECKPOINT).exists():
            self.update = load_checkpoint(output / CHECKPOINT, self.writer, self.optimiser, self._facts)
            self.log = [entry for entry in _read_log(output / LOG) if entry["update"] <= self.update]
        elif start_from is not None:
            if (start_from / CHECKPOINT).exists() and not settings.attention_updates:
                take_over(start_from / CHECKPOINT, self.writer, self.optimiser, self._facts)
        elif settings.writer.initialisation == "anchored":
            self._anchor()

    @property
    def _facts(self) -> dict[str, Any]:
        """What a run that is resumed must be alike in."""
        return {
            "model": self.record.model_fingerprint,
            "corpus": self.corpus.digest,
            "settings": self.settings.model_dump(mode="json"),
            "start": self.start,
        }

    def _first_writer(self, start_from: Path | None) -> FastDiamond:
        """Return the writer that the run begins with, and note which it is."""
        self.start, self.before = "", dict[str, Any]()
        if start_from is None:
            return self.record.new_writer(self.settings.seed)
        writer, record = load_writer(start_from)
        misfit = record.misfit(self.engine.describe(), self.engine.geometry)
        if misfit or record.settings != self.settings.writer:
            raise TrainingError(
                f"the writer {start_from} cannot be gone on with: {misfit or 'its settings are others than asked for'}"
            )
        self.before = record.training
        self.start = tensors_digest("", {name: tensor.detach() for name, tensor in writer.named_parameters()})
        return writer.requires_grad_(True)

    def run(self) -> Path:
        """Train to the end, or from where the folder's checkpoint is; return the writer's path.

        SIGTERM and SIGINT end it with a checkpoint of the last whole update: raises TrainingStopped.
        """
        stopped = False
        with _asked_to_stop() as asked:
            while self.update < self.settings.total and not stopped:
                stopped = not self._one_update(asked)
        if stopped:
            self._save()
            raise TrainingStopped(
                f"stopped after {self.update:,} of {self.settings.total:,} updates; the same command goes on from there"
            )
        self._save()
        return self._finish()

    def _one_update(self, asked: Callable[[], bool]) -> bool:
        """Do the next update; False where a stop was asked for before it was whole, so that it was not done."""
        settings = self.settings
        started, losses = time.perf_counter(), []
        if self.update == settings.attention_updates > 0:
            self.optimiser.state.clear()  # moments of the other loss would make the first steps many times too long
        self.optimiser.zero_grad(set_to_none=True)
        examples = self._examples
        for number in examples:
            if asked():
                return False
            loss = self._loss(*self._example(number))
            (loss / len(examples)).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(self.writer.parameters(), settings.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate(self.update)
        self.optimiser.step()
        phase = "attention" if self._in_attention_phase else "continuation"
        self.update += 1
        entry = {"update": self.update, "phase": phase, "loss": sum(losses) / len(losses)}
        if self.update % settings.measure_every == 0 or self.update in (settings.attention_updates, settings.total):
            entry["held_out"], entry["held_out_attention"] = self.measure()
        self.log.append(entry)
        if self.update % settings.checkpoint_every == 0:
            self._save()
        self._tell(entry, time.perf_counter() - started)
        return True

    @property
    def _in_attention_phase(self) -> bool:
        return self.update < self.settings.attention_updates

    @property
    def _examples(self) -> range:
        """Numbers of the next update's examples."""
        settings = self.settings
        if self._in_attention_phase:
            begin, count = self.update * settings.attention_accumulate, settings.attention_accumulate
        else:
            before = settings.attention_updates * (settings.attention_accumulate - settings.accumulate)
            begin, count = before + self.update * settings.accumulate, settings.accumulate
        return range(begin, begin + count)

    def _anchor(self) -> None:
        """Let each first latent look for the first entry of a context."""
        contexts = [self.teacher.context(window) for window in self.corpus.train[:ANCHORS]]
        for place, index in enumerate(self.engine.geometry.full_layers):
            spans = [context.layers[index].span for context in contexts]
            firsts = [(span.dense(span.keys)[:, :1], span.dense(span.values)[:, 0]) for span in spans]
            start = torch.zeros(1, dtype=torch.long)
            keys = torch.stack([self.engine.rotate(key, start, back=True)[:, 0] for key, _ in firsts])
            self.writer.anchor(place, keys.float(), torch.stack([value for _, value in firsts]).float())

    def _example(self, number: int) -> tuple[Window, Cue]:
        """Return example `number` of the run: windows in an order of each epoch, another cue each time."""
        windows = self.corpus.train
        epoch, place = divmod(number, len(windows))
        order = list(range(len(windows)))
        random.Random(f"{self.settings.seed}|epoch|{epoch}").shuffle(order)
        window = windows[order[place]]
        return window, window.cue(epoch % self.settings.cues, self.settings)

    def _compacted(self, window: Window) -> CompactedCache:
        return written_cache(self.writer, self.engine, self.teacher.context(window), self.settings.applications)

    def _loss(self, window: Window, cue: Cue) -> Tensor:
        """Return an example's loss in the phase the run is in."""
        said, compacted = self.teacher.cue(window, cue), self._compacted(window)
        if self._in_attention_phase:
            return attention_loss(self.engine, compacted, said)
        weight = self.settings.attention_weight
        beside = weight * attention_loss(self.engine, compacted, said) if weight else 0.0
        return self._continuation_loss(compacted, cue, said) + beside

    def _continuation_loss(self, compacted: CompactedCache, cue: Cue, said: dict[str, Tensor]) -> Tensor:
        device = self.engine.model.device
        mixed = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()
        with mixed:
            return continuation_loss(self.engine, compacted, cue, said)

    def _learning_rate(self, update: int) -> float:
        """Each phase rises over its warm-up and falls by a cosine to the floor."""
        settings = self.settings
        of_attention = update < settings.attention_updates
        done = update if of_attention else update - settings.attention_updates
        total = settings.attention_updates if of_attention else settings.updates
        highest = settings.attention_learning_rate if of_attention else settings.learning_rate
        if done < settings.warmup:
            return highest * (done + 1) / settings.warmup
        fraction = (done - settings.warmup) / max(1, total - settings.warmup)
        return highest * (settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * fraction)) / 2)

    @torch.no_grad()
    def measure(self) -> tuple[float, float | None]:
        """Return the held-out losses, the mean over examples: on continuations, and on attention outputs if used."""
        of_continuations, of_attention = [], []
        for number in range(self.settings.held_out_examples):
            turn, place = divmod(number, len(self.corpus.held_out))
            window = self.corpus.held_out[place]
            cue = window.cue(turn, self.settings)
            said, compacted = self.teacher.cue(window, cue), self._compacted(window)
            if self.teacher.attention:
                of_attention.append(float(attention_loss(self.engine, compacted, said)))
            of_continuations.append(float(self._continuation_loss(compacted, cue, said)))
        mean = sum(of_continuations) / len(of_continuations)
        return mean, sum(of_attention) / len(of_attention) if of_attention else None

    @property
    def held_out(self) -> float | None:
        """The held-out loss on continuations as last measured."""
        return next((entry["held_out"] for entry in reversed(self.log) if "held_out" in entry), None)

    def _seconds_left(self, phase: str, seconds: float) -> float:
        """Estimate from the latest updates of this phase; what the other phase costs is a guess until it comes."""
        settings = self.settings
        recent = self._recent.setdefault(phase, deque(maxlen=RECENT))
        recent.append(seconds)
        each = sum(recent) / len(recent)
        if phase == "continuation":
            return (settings.total - self.update) * each
        later = CONTINUATION_COST * each * settings.accumulate / settings.attention_accumulate
        return (settings.attention_updates - self.update) * each + settings.updates * later

    def _tell(self, entry: dict[str, Any], seconds: float) -> None:
        settings = self.settings
        examples = settings.attention_accumulate if entry["phase"] == "attention" else settings.accumulate
        tokens = examples * (settings.context + settings.cue + settings.continuation)
        self.report(
            TrainingStep(
                update=self.update,
                total=settings.total,
                phase=entry["phase"],
                loss=entry["loss"],
                held_out=self.held_out,
                tokens_per_second=tokens / seconds,
                seconds_left=self._seconds_left(entry["phase"], seconds),
            )
        )

    def _save(self) -> None:
        """Write the log, the writer so far, and then the checkpoint."""
        with atomic_output(self.output / LOG, overwrite=True, private=False) as temporary:
            temporary.write_text("".join(json.dumps(entry) + "\n" for entry in self.log))
        self._save_writer()
        save_checkpoint(self.output / CHECKPOINT, self.writer, self.optimiser, self.update, self._facts)

    def _save_writer(self) -> Path:
        training = {
            "updates": self.update,
            "settings": self.settings.model_dump(mode="json", exclude={"writer"}),
            "corpus": {"train_windows": len(self.corpus.train), "held_out_windows": len(self.corpus.held_out)},
            "held_out": self.held_out,
            **({"before": self.before} if self.start else {}),
        }
        record = self.record.model_copy(update={"training": training})
        return save_writer(self.writer, record, self.output / WRITER, overwrite=True)

    def _finish(self) -> Path:
        from agentcompact.training.plot import plot_losses

        plot_losses(self.log, self.output / PLOT)
        return self.output / WRITER


def _read_log(path: Path) -> list[dict[str, Any]]:
    """Read a log, as far as it can be read."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise TrainingError(f"{path} is damaged: remove the folder and train anew") from error


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether SIGTERM or SIGINT came; both do only that inside the block."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: signals are not ours
        before = {}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
