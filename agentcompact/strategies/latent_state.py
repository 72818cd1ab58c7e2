"""What a latent compaction has reached, and its checkpoint: one safetensors file with JSON in its header, no pickle."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentcompact.cache import Span
from agentcompact.errors import CacheFileError, WriteError
from agentcompact.files import atomic_output

VERSION = 1
Stage = Literal["stage 1", "stage 2", "done"]
STAGE1: Stage = "stage 1"
STAGE2: Stage = "stage 2"
DONE: Stage = "done"
PARTS = ("keys", "values", "bias", "positions", "frozen")


def _no_losses() -> dict[str, list[float]]:
    return {STAGE1: [], STAGE2: []}


class Place(BaseModel):
    """Where a compaction stands.

    run: a hash of all that the result depends on. update: the next update of the stage. group: the group of layers
    that stage 1 is at. losses: by stage, of each update before it was made; stage 1's is the mean over layers.
    seconds: by phase, of all processes that worked on it.
    """

    model_config = ConfigDict(extra="forbid")

    version: int = VERSION
    run: str
    stage: Stage = STAGE1
    group: int = 0
    update: int = 0
    losses: dict[str, list[float]] = Field(default_factory=_no_losses)
    seconds: dict[str, float] = Field(default_factory=dict)


class TrainingState:
    """The entries in float32, which of them are frozen in stage 1, the optimiser's moments, and the place.

    spans: of each full layer, biases in their dtype. frozen: of each full layer (entries,) bool.
    """

    def __init__(
        self, spans: list[Span], frozen: list[Tensor], place: Place, moments: dict[str, Tensor] | None = None
    ) -> None:
        self.spans, self.frozen, self.place, self.moments = spans, frozen, place, moments or {}

    def advance(self, stage: Stage, group: int = 0, update: int = 0) -> None:
        """Go on to the beginning of a stage or of a group, with fresh moments, or to an update within one."""
        if update == 0:
            self.moments = {}
        self.place.stage, self.place.group, self.place.update = stage, group, update

    def save(self, path: Path) -> None:
        """Write the checkpoint, whole or not at all, readable by its owner only. Raises WriteError."""
        tensors: dict[str, Tensor] = {f"moments.{name}": tensor for name, tensor in self.moments.items()}
        for index, (span, frozen) in enumerate(zip(self.spans, self.frozen, strict=True)):
            parts = (span.keys, span.values, span.bias, span.positions, frozen)
            tensors.update({f"layers.{index}.{name}": part for name, part in zip(PARTS, parts, strict=True)})
            tensors[f"layers.{index}.offsets"] = torch.tensor(span.offsets)
        with atomic_output(path, overwrite=True) as temporary:
            try:
                save_file(
                    {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
                    temporary,
                    {"agentcompact_checkpoint": self.place.model_dump_json()},
                )
            except SafetensorError as error:
                raise WriteError(f"{path} could not be written: {error}") from error

    @classmethod
    def load(cls, path: Path, run: str, like: list[Span]) -> TrainingState:
        """Read a checkpoint of the run `run`; its entries go to the devices of the spans `like`.

        Raises CacheFileError where the file is damaged, of another version, or of a compaction that differs in the
        model, the document, the budget, the seed or a setting.
        """
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get("agentcompact_checkpoint")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CacheFileError(f"{path} is no checkpoint that can be read: begin again without --resume") from error
        try:
            place = Place.model_validate(json.loads(text or ""))
        except (ValidationError, ValueError) as error:
            raise CacheFileError(f"{path} is no checkpoint of a latent compaction of this version") from error
        if place.run != run:
            raise CacheFileError(
                f"{path} is the checkpoint of another compaction (model, document, budget, seed or a setting differ): "
                "give the same ones, or begin again with --force"
            )
        spans, frozen = [], []
        for index, source in enumerate(like):
            keys, values, bias, positions, held = (
                tensors[f"layers.{index}.{name}"].to(source.keys.device) for name in PARTS
            )
            spans.append(Span(keys, values, bias, positions, tuple(tensors[f"layers.{index}.offsets"].tolist())))
            frozen.append(held)
        kept = {name.removeprefix("moments."): t for name, t in tensors.items() if name.startswith("moments.")}
        return cls(spans, frozen, place, kept)


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed since, so that an update is never left half made.

    A second Ctrl-C ends at once. Outside the main thread, or where someone else handles the signal, nothing is changed.
    """
    pressed = False

    def note(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
