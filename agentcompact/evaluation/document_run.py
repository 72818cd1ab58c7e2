"""One document of an evaluation: prefilled once, then compacted, asked and measured once for each cell."""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from agentcompact.api import library_version, prefill_document
from agentcompact.cache import CompactedCache, Report
from agentcompact.engines import Engine, Progress
from agentcompact.errors import AgentCompactError, CacheFileError
from agentcompact.evaluation.asking import Asked, ask, encode_questions
from agentcompact.evaluation.choices import StrategyChoice
from agentcompact.evaluation.metrics.attention import HeldOutAttention
from agentcompact.evaluation.metrics.speed import decode_rate
from agentcompact.evaluation.records import Document
from agentcompact.evaluation.results import NO_CONTEXT, CellResult
from agentcompact.evaluation.tasks.haystack import novel_sentences
from agentcompact.fitting.continuation_fidelity import continuation_fidelity
from agentcompact.settings import resolve_budget
from agentcompact.strategies import CompactionRequest

METRICS = ("answers", "fidelity", "attention", "speed")
"""What can be measured; "answers" always is."""

ARRIVING_TOKENS, ARRIVING_SENTENCES = 128, 16
"""What arrives before a compaction, and the sentences it is taken from."""

# What a strategy of somebody else's may raise: a cell that fails is recorded, and the others go on.
CELL_FAILURES = (
    AgentCompactError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class DocumentRun:
    """Measures the cells of one document; the full cache and what is compared with it are made on first use.

    compactions: how often a strategy compacts in a row; before each but the first a piece of other text arrives, and
    the budget stays. earlier: the run with fewer compactions that this one goes on from. progress: told what a
    compaction is at.
    """

    def __init__(
        self,
        engine: Engine,
        document: Document,
        metrics: frozenset[str],
        seed: int,
        compactions: int = 1,
        earlier: DocumentRun | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.engine = engine
        self.document = document
        self.metrics = metrics
        self.seed = seed
        self.compactions = compactions
        self.earlier = earlier
        self.progress = progress
        self._states: dict[tuple[str, float], CompactedCache] = {}

    def after(self, compactions: int) -> DocumentRun:
        """Return the run in which strategies compact so often, itself where it is that one."""
        if compactions == self.compactions:
            return self
        return DocumentRun(self.engine, self.document, self.metrics, self.seed, compactions, self, self.progress)

    @cached_property
    def full_cache(self) -> CompactedCache:
        """The cache of the document and of what arrived after it, uncompacted, with the queries of its prefill."""
        if self.earlier is not None:
            cache = self.earlier.full_cache.fork()
            for number in range(self.earlier.compactions, self.compactions):
                cache = self._arrive(cache, number)
            return cache
        cache = prefill_document(self.engine, self.document.context, prompt="raw", capture_seed=self.seed)
        for number in range(1, self.compactions):
            cache = self._arrive(cache, number)
        return cache

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

    def measure(
        self, label: str, ratio: float | None, choice: StrategyChoice | None, checkpoints: Path | None = None
    ) -> CellResult:
        """Return a cell's result; a failure is one too, with its error in one line.

        checkpoints: a folder in which a strategy that takes long keeps what it has reached, and goes on from it.
        """
        facts = self._facts(label, ratio, choice)
        error = self._full_error
        if error is None:
            try:
                return CellResult(**facts, **self._measured(label, ratio, choice, checkpoints))
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

    def _measured(
        self, label: str, ratio: float | None, choice: StrategyChoice | None, checkpoints: Path | None
    ) -> dict[str, Any]:
        if label == NO_CONTEXT:
            return self._asked(self.engine.new_cache(), None, before=self.engine.beginning())
        if choice is None or ratio is None:
            return self._with_cache(self.full_cache)
        return self._compacted(choice, ratio, checkpoints)

    def _compacted(self, choice: StrategyChoice, ratio: float, checkpoints: Path | None) -> dict[str, Any]:
        budget = resolve_budget(self._tokens, ratio=ratio)
        done, cache = self._state(choice, ratio)
        for number in range(done, self.compactions):
            if number:
                cache = self._arrive(cache.fork(), number)
            request = CompactionRequest(
                engine=self.engine,
                cache=cache,
                budget=budget,
                seed=self.seed,
                progress=self.progress,
                checkpoint=_checkpoint(checkpoints, choice, number),
                resume=True,
            )
            cache = _compact(choice, request)
        self._states[choice.label, ratio] = cache
        return {**self._with_cache(cache), **_cost(cache.metadata.reports[-1])}

    def _state(self, choice: StrategyChoice, ratio: float) -> tuple[int, CompactedCache]:
        """Return how often the latest cache of this strategy and ratio was compacted, and the cache."""
        run: DocumentRun | None = self
        while run is not None:
            if (choice.label, ratio) in run._states:
                return run.compactions, run._states[choice.label, ratio]
            first, run = run, run.earlier
        return 0, first._document_cache

    @cached_property
    def _document_cache(self) -> CompactedCache:
        """The cache of the document alone."""
        if self.compactions == 1:
            return self.full_cache
        return prefill_document(self.engine, self.document.context, prompt="raw", capture_seed=self.seed)

    def _arrive(self, cache: CompactedCache, number: int) -> CompactedCache:
        """Prefill the text that arrives before the compaction after `number` of them."""
        return self.engine.prefill(arriving_tokens(self.engine, number), cache, capture_seed=self.seed)

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
            "settings": {} if choice is None else choice.settings,
            "ratio": ratio,
            "compactions": self.compactions,
            "seed": self.seed,
            "metrics": sorted(self.metrics),
            "versions": versions(),
        }


def arriving_tokens(engine: Engine, number: int) -> list[int]:
    """Return the token ids of the text that arrives before the compaction after `number` of them: part of a novel."""
    sentences = novel_sentences()
    text = "\n" + " ".join(sentences[(number * ARRIVING_SENTENCES) % len(sentences) :][:ARRIVING_SENTENCES])
    return engine.encode(text)[:ARRIVING_TOKENS]


def versions() -> dict[str, str]:
    """What the figures depend on beside the model."""
    return {
        "agentcompact": library_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": str(torch.get_num_threads()),
    }


def _compact(choice: StrategyChoice, request: CompactionRequest) -> CompactedCache:
    """Compact; a checkpoint that cannot be gone on from is made anew."""
    try:
        return choice.strategy.compact(request).cache
    except CacheFileError:
        if request.checkpoint is None or not request.checkpoint.exists():
            raise
        request.checkpoint.unlink()
        return choice.strategy.compact(request).cache


def _checkpoint(folder: Path | None, choice: StrategyChoice, number: int) -> Path | None:
    """Return the file for the checkpoint of the compaction after `number` of them, for a strategy that keeps one."""
    if folder is None or not choice.strategy.resumable:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{number}.checkpoint"


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
        "training": report.training,
        "warnings": report.warnings,
    }
