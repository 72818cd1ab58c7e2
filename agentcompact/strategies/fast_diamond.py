"""fast_diamond: a trained writer makes the smaller cache in one small forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field

from agentcompact.cache import Report, Span
from agentcompact.engines import ROTATES_STATES, Engine
from agentcompact.errors import WriterFileError
from agentcompact.strategies.base import CompactionRequest, Phases, Strategy, StrategySettings
from agentcompact.writers import FastDiamond, WriterRecord, load_writer, shipped_writer, write_span

RATIO_TOLERANCE = 0.1


class FastDiamondSettings(StrategySettings):
    writer: str | None = Field(
        None, description="folder or file that train-writer made; the embedded model's comes with the package"
    )


class FastDiamondStrategy(Strategy):
    """Every layer and KV head is rewritten by the writer that was trained for the model, chunk by chunk.

    A chunk is at most what the writer was trained to read, and becomes at most as many entries as it has latents; what
    was compacted before is read like anything else, so compacting again at the same budget is the rolling use. Source:
    "The Optimization Landscape of Learning Compacted Context Models", sections 5 and 6.3.
    """

    name = "fast_diamond"
    summary = "learned: a trained writer makes new entries in one small pass; needs a writer for the model"
    settings_type = FastDiamondSettings
    settings: FastDiamondSettings
    needs = frozenset({ROTATES_STATES})
    learned = True
    _loaded: tuple[str, FastDiamond, WriterRecord] | None = None

    def check_engine(self, engine: Engine) -> None:
        super().check_engine(engine)
        self.writer_for(engine)

    def writer_for(self, engine: Engine) -> tuple[FastDiamond, WriterRecord]:
        """Return the writer for an engine's model. Raises WriterFileError where there is none, or another's."""
        metadata = engine.describe()
        if self._loaded is None or self._loaded[0] != metadata.model_fingerprint:
            path = self.settings.writer
            found = shipped_writer(metadata.model_fingerprint) if path is None else load_writer(Path(path))
            if found is None:
                raise WriterFileError(
                    f"no writer comes with the package for {metadata.model_source}: train one with "
                    "agentcompact train-writer, and name it with --writer (the setting writer)"
                )
            misfit = found[1].misfit(metadata, engine.geometry)
            if misfit:
                raise WriterFileError(f"the writer {path} does not fit: {misfit}; train one for this model")
            self._loaded = (metadata.model_fingerprint, *found)
        return self._loaded[1], self._loaded[2]

    @torch.no_grad()
    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        writer, record = self.writer_for(request.engine)
        report.warnings.extend(_warnings(record, spans, request.budget))
        written = []
        with phases.phase("writing"):
            writer.to(spans[0].keys.device)
            for place, span in enumerate(spans):
                written.append(write_span(writer, place, span, request.budget, request.engine.rotate))
                if request.progress is not None:
                    request.progress(f"{self.name}: writing", place + 1, len(spans))
        return written


def _warnings(record: WriterRecord, spans: Sequence[Span], budget: int) -> list[str]:
    """Say where a budget is another than the writer was trained for."""
    settings = record.settings
    entries = max(max(span.lengths) for span in spans)
    ratio, trained = entries / budget, settings.context / settings.latents
    if abs(ratio / trained - 1) <= RATIO_TOLERANCE:
        return []
    return [
        f"the writer was trained for {settings.context:,} entries into {settings.latents:,} ({trained:.3g}x), and this "
        f"is {entries:,} into {budget:,} ({ratio:.3g}x): train one for that ratio, or take it as an approximation"
    ]
