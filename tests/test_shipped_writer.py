"""The writer that comes with the package, on the embedded model."""

from __future__ import annotations

import pytest
import torch

from agentcompact import TransformersEngine, compact, recompact
from agentcompact.training.forward import hidden_states, logits_of
from agentcompact.training.objective import divergence
from agentcompact.writers import read_record, shipped_writer
from agentcompact.writers.shipped import FOLDER

LARGEST = 15_000_000


@pytest.fixture(scope="module")
def engine(smollm2):
    return TransformersEngine(smollm2)


def test_what_is_shipped(engine):
    (path,) = FOLDER.glob("*.safetensors")
    assert path.stat().st_size < LARGEST
    record = read_record(path)
    assert record.misfit(engine.describe(), engine.geometry) is None
    assert (record.settings.context, record.settings.latents) == (1024, 128)
    assert record.training["updates"] > 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert path.with_suffix(".jsonl").read_text().startswith('{"update": 1,')
    assert shipped_writer("another model") is None


def test_the_alias_takes_it(engine, document):
    cache = compact(engine, document[:2000], "fast_diamond", ratio=8)
    report = cache.metadata.reports[-1]
    assert report.warnings == []
    assert cache.held_positions == report.budget == -(-cache.next_position // 8)
    assert torch.isfinite(engine.next_token_logits(cache, engine.encode("What is this?"))).all()


def test_it_says_more_than_no_context_and_than_the_latest_entries(engine, document):
    """On the demo document, which no writer is trained on; eight times smaller."""
    ids = engine.encode(document)[: 1024 + 192]
    full = engine.prefill(ids[:1024])

    def logits(cache):
        with torch.no_grad():
            return logits_of(engine.model, hidden_states(engine.model, cache, ids[512 : 512 + 191])[-128:])

    teacher = logits(full.fork())
    nothing = float(divergence(teacher, logits(engine.new_cache())))
    small = float(divergence(teacher, logits(recompact(engine, full, "fast_diamond", budget=128))))
    latest = float(divergence(teacher, logits(recompact(engine, full, "streaming_llm", budget=128))))
    assert small < latest
    assert small < 0.9 * nothing
