"""Untrained writers for the tiny models, and tiny corpora; shared by the tests, holds none itself."""

from __future__ import annotations

from typing import Any

import torch
from tiny import tiny_text

from agentcompact import TransformersEngine
from agentcompact.training import TrainingSettings, cut_corpus
from agentcompact.writers import FastDiamond, WriterRecord, WriterSettings, save_writer


def tiny_writer(
    engine: TransformersEngine, context: int = 24, latents: int = 8, noise: float = 0.05, **settings: Any
) -> tuple[FastDiamond, WriterRecord]:
    """Return a writer that fits an engine's model, its parts moved off their beginning by some noise."""
    record = WriterRecord.of_model(
        WriterSettings(context=context, latents=latents, **settings), engine.describe(), engine.geometry
    )
    writer = record.new_writer()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in writer.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return writer, record


def tiny_writer_file(engine: TransformersEngine, folder: Any, **settings: Any) -> str:
    """Write such a writer into a folder and return the path of its file."""
    writer, record = tiny_writer(engine, **settings)
    return str(save_writer(writer, record, folder / "writer.safetensors", overwrite=True))


def tiny_training(**changes: Any) -> TrainingSettings:
    """Return settings of a training run that takes a second or two."""
    values: dict[str, Any] = {
        "writer": WriterSettings(context=24, latents=6),
        "updates": 6,
        "attention_updates": 3,
        "accumulate": 2,
        "warmup": 2,
        "cue": 4,
        "continuation": 6,
        "beyond": 16,
        "measure_every": 3,
        "checkpoint_every": 2,
        "held_out_examples": 2,
    }
    return TrainingSettings(**{**values, **changes})


def tiny_corpus(engine: TransformersEngine, settings: TrainingSettings, documents: int = 6) -> Any:
    texts = [(f"document {number}", tiny_text(90, number)) for number in range(documents)]
    return cut_corpus(texts, engine.encode, settings)
