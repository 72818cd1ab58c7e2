"""One document of an evaluation: prefilled once, then compacted, asked and measured once for each cell."""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from agentcompact.api import library_version, prefill_document
from agentcompact.cache import CompactedCache, Report
from agentcompact.engines import Engine
from agentcompact.errors import AgentCompactError
from agentcompact.evaluation.asking import Asked, ask, encode_questions
from agentcompact.evaluation.choices import StrategyChoice
from agentcompact.evaluation.metrics.attention import HeldOutAttention
from agentcompact.evaluation.metrics.fidelity import continuation_fidelity
from agentcompact.evaluation.metrics.speed import decode_rate
from agentcompact.evaluation.records import Document
from agentcompact.evaluation.results import NO_CONTEXT, CellResult
from agentcompact.settings import resolve_budget
from agentcompact.strategies import CompactionRequest

METRICS = ("answers", "fidelity", "attention", "speed")
"""What can be measured; "answers" always is."""

# What a strategy of somebody else's may raise: a cell that fails is recorded, and the others go on.
CELL_FAILURES = (
    AgentCompactError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class DocumentRun:
    """Measures the cells of one document; the full cache and what is compared with it are made on first use."""

    def __init__(self, engine: Engine, document: Document, metrics: frozenset[str], seed: int) -> None:
        self.engine = engine
        self.document = document
        self.metrics = metrics
        self.seed = seed

    @cached_property
    def full_cache(self) -> CompactedCache:
        """The document's cache, uncompacted, with the queries of its prefill."""
        return prefill_document(self.engine, self.document.context, prompt="raw", capture_seed=self.seed)

    @cached_property
    def full_answers(self) -> Asked:
        prompts = encode_questions(self.engine, self.document.questions)
        return ask(self.engine, self.full_cache, prompts, fidelity="fidelity" in self.metrics)

    @cached_property
    def held_out(self) -> HeldOutAttention:
        prompts = encode_questions(self.engine, self.document.questions)
        turns = [
            [*prompt.token_ids, *answer]
            for prompt, answer in zip(prompts, self.full_answers.continuations, strict=True)
        ]
        return HeldOutAttention(self.engine, self.full_cache, turns, self.seed)

    def measure(self, label: str, ratio: float | None, choice: StrategyChoice | None) -> CellResult:
        """Return a cell's result; a failure is one too, with its error in one line."""
        facts = self._facts(label, ratio, choice)
        error = self._full_error
        if error is None:
            try:
                return CellResult(**facts, **self._measured(label, ratio, choice))
            except CELL_FAILURES as failure:
                error = _one_line(failure)
        return CellResult(**facts, status="failed", error=error)

    @cached_property
    def _full_error(self) -> str | None:
        """Why the full cache could not be made or asked, without which no cell can be measured."""
        try:
            self.full_answers  # noqa: B018
        except CELL_FAILURES as failure:
            return _one_line(failure)
        return None

    def _measured(self, label: str, ratio: float | None, choice: StrategyChoice | None) -> dict[str, Any]:
        if label == NO_CONTEXT:
            return self._asked(self.engine.new_cache(), None, before=self.engine.beginning())
        if choice is None or ratio is None:
            return self._with_cache(self.full_cache)
        return self._compacted(choice, ratio)

    def _compacted(self, choice: StrategyChoice, ratio: float) -> dict[str, Any]:
        full = self.full_cache
        request = CompactionRequest(
            engine=self.engine,
            cache=full,
            budget=resolve_budget(full.next_position, ratio=ratio),
            seed=self.seed,
        )
        result = choice.strategy.compact(request)
        return {**self._with_cache(result.cache), **_cost(result.report)}

    def _with_cache(self, cache: CompactedCache) -> dict[str, Any]:
        """Everything that is measured of a cache that stands for the document."""
        facts = self._asked(cache, self.full_answers if cache is self.full_cache else None)
        facts["entries_per_head"] = [
            list(cache.source(index, 0, cache.next_position).lengths) for index, _ in cache.full_layers
        ]
        facts["held_positions"], facts["bytes"] = cache.held_positions, cache.nbytes
        facts["prefill_seconds"] = self.full_cache.metadata.prefill_seconds
        errors = self.held_out.compare(cache) if "attention" in self.metrics else None
        if errors is not None:
            facts.update(
                output_error=errors.output,
                mass_error=errors.mass,
                log_mass_error=errors.log_mass,
                overlap=errors.overlap,
            )
        if "speed" in self.metrics:
            facts["decode_tokens_per_second"] = decode_rate(self.engine, cache, self.full_cache.token_ids[-1])
        return facts

    def _asked(self, cache: CompactedCache, asked: Asked | None, before: list[int] | None = None) -> dict[str, Any]:
        """Answers, and how near they are to the full cache's."""
        full, fidelity = self.full_answers, "fidelity" in self.metrics
        if asked is None:
            prompts = encode_questions(self.engine, self.document.questions, before or ())
            asked = ask(self.engine, cache, prompts, full.continuations, fidelity=fidelity)
        facts: dict[str, Any] = {"questions": asked.results}
        if fidelity:
            facts["kl"], facts["top1"] = continuation_fidelity(full.logits, asked.logits)
        return facts

    @cached_property
    def _tokens(self) -> int:
        return len(self.engine.beginning()) + len(self.engine.encode(self.document.context))

    def _facts(self, label: str, ratio: float | None, choice: StrategyChoice | None) -> dict[str, Any]:
        """What says which cell this is."""
        known = self.engine.describe()
        return {
            "model": _name(known.model_source),
            "fingerprint": known.model_fingerprint,
            "dtype": known.model_dtype,
            "task": self.document.task,
            "document": self.document.id,
            "digest": self.document.digest,
            "tokens": self._tokens,
            "length": self.document.length,
            "strategy": label,
            "settings": {} if choice is None else choice.strategy.settings.model_dump(mode="json"),
            "ratio": ratio,
            "seed": self.seed,
            "metrics": sorted(self.metrics),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """What the figures depend on beside the model."""
    return {
        "agentcompact": library_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": str(torch.get_num_threads()),
    }


def _name(source: str) -> str:
    """Name a model as people do: a hub's id as it is, a folder or a file without the path to it."""
    return Path(source).name if Path(source).exists() else source


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else "no message"
    return said if isinstance(error, AgentCompactError) else f"{type(error).__name__}: {said}"


def _cost(report: Report) -> dict[str, Any]:
    return {
        "compaction_seconds": report.seconds["total"],
        "compaction_tokens": report.compaction_tokens,
        "warnings": report.warnings,
    }
