"""What a latent compaction will hold in memory, what there is, and what was held at most."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentcompact.cache import Span
from agentcompact.errors import MemoryLimitError
from agentcompact.queries.recitation import LENGTH
from agentcompact.strategies.base import CompactionRequest
from agentcompact.strategies.latent_settings import DistillationSettings

GIB = 1024**3


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a compaction needs beside the model and the full cache, by what for."""

    queries: int
    scores: int
    generation: int
    entries: int
    stage1: int
    stage2: int

    @property
    def peak(self) -> int:
        """The most that is held at one time: the rollouts' queries always, the rest one after another."""
        return self.queries + max(self.generation, self.scores, self.entries + max(self.stage1, self.stage2))


def memory_need(
    request: CompactionRequest, spans: Sequence[Span], settings: DistillationSettings, prompts: Sequence[Sequence[int]]
) -> MemoryNeed:
    """Estimate what a compaction of these spans with prompts of these token ids needs."""
    geometry, size = request.engine.geometry, spans[0].keys.element_size()
    layers, dim = len(spans), geometry.head_dim
    longest = max(len(prompt) for prompt in prompts) + settings.answer_tokens
    predicted = min(longest, 2 * settings.answer_tokens)
    positions = min(settings.pool, sum(len(prompt) + settings.answer_tokens for prompt in prompts))
    if settings.schedule.recitation:
        positions += min(settings.pool, 2 * (request.end - request.start))
        longest, predicted = max(longest, 2 * LENGTH), max(predicted, LENGTH)
    a_layer = geometry.query_heads * positions * (dim + 1)
    entries = request.budget * layers * geometry.kv_heads * (2 * dim + 1)
    batch = min(settings.rollout_batch, len(prompts))
    schedule = settings.schedule
    return MemoryNeed(
        queries=a_layer * layers * size,
        scores=min(
            request.engine.settings.capture_bytes,
            (request.end - request.start) * layers * geometry.query_heads * dim * size,
        ),
        generation=batch * longest * layers * geometry.kv_heads * dim * 2 * size,
        entries=entries * 4 * 4,
        stage1=a_layer * 4 * 2 if schedule.stage1_updates else 0,
        stage2=(
            request.engine.gradient_bytes(settings.stage2_rollouts, longest, request.budget, predicted)
            if schedule.stage2_updates
            else 0
        ),
    )


def check_memory(need: MemoryNeed, settings: DistillationSettings, device: torch.device) -> None:
    """Raise MemoryLimitError, with numbers, where the need is above the limit or above what is free."""
    free = free_bytes(device) if settings.memory_gib is None else int(settings.memory_gib * GIB)
    if free is not None and need.peak > free:
        raise MemoryLimitError(
            f"this compaction needs about {need.peak / GIB:.1f} GiB beside the model and the full cache (queries "
            f"{need.queries / GIB:.1f}, entries and moments {need.entries / GIB:.1f}, stage 1 {need.stage1 / GIB:.1f}, "
            f"stage 2 {need.stage2 / GIB:.1f}), and {free / GIB:.1f} GiB are free: lower pool, stage2_rollouts or "
            "answer_tokens, or raise memory_gib if that is wrong"
        )


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes a device has left, or None where it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    facts = Path("/proc/meminfo")
    if device.type != "cpu" or not facts.is_file():
        return None
    for line in facts.read_text(encoding="ascii", errors="ignore").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that this process has held so far: on a GPU of tensors, else of memory in all."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
