"""Writers that come with the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from agentcompact.writers.fast_diamond import FastDiamond
from agentcompact.writers.file import WriterRecord, load_writer, read_record

FOLDER = Path(__file__).parent / "shipped"


@cache
def shipped_writer(fingerprint: str) -> tuple[FastDiamond, WriterRecord] | None:
    """Return the writer that the package brings for the model with that fingerprint, or None."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        if read_record(path).model_fingerprint == fingerprint:
            return load_writer(path)
    return None
