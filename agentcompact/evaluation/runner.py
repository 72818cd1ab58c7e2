"""Runs an evaluation: every document, every strategy, every ratio, and goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentcompact.engines import Engine, Progress
from agentcompact.errors import SettingsError
from agentcompact.evaluation.choices import StrategyChoice
from agentcompact.evaluation.document_run import METRICS, DocumentRun
from agentcompact.evaluation.records import Document
from agentcompact.evaluation.results import FULL, NO_CONTEXT, CellKey, CellResult, cell_key
from agentcompact.evaluation.store import ResultStore, open_store
from agentcompact.settings import resolve_budget, suggestion

WARM_UP_TOKENS = 32
MOST_COMPACTIONS = 1000
Cell = tuple[str, float | None, StrategyChoice | None, int]
"""A strategy's label, its ratio, the strategy, and how often it compacts."""
Missing = tuple[Cell, CellKey, CellResult | None]
"""A cell to be measured, its key, and the result it has already."""


@dataclass(frozen=True)
class Step:
    """One cell that was just measured, how far the evaluation is, and the seconds it may still take."""

    cell: CellResult
    done: int
    total: int
    seconds_left: float


@dataclass(frozen=True)
class EvaluationPlan:
    """What to measure: strategies by ratios, with `full` and `no_context` beside them.

    metrics: of `METRICS`; answers are always measured. compactions: how often a document is compacted in a row,
    with new text arriving before each but the first; each number is a cell of its own. seed: of the strategies'
    random choices. retry_failed: whether cells that failed before are measured again.
    """

    strategies: Sequence[StrategyChoice]
    ratios: Sequence[float]
    metrics: frozenset[str] = frozenset(METRICS)
    seed: int = 0
    retry_failed: bool = False
    compactions: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        """Raises SettingsError or BudgetError for a metric or a ratio that cannot be."""
        for name in sorted(self.metrics):
            if name not in METRICS:
                raise SettingsError(
                    f"there is no metric '{name}'{suggestion(name, METRICS)}; there are: {', '.join(METRICS)}"
                )
        for ratio in self.ratios:
            resolve_budget(1, ratio=ratio)
        if not self.compactions or min(self.compactions) < 1 or max(self.compactions) > MOST_COMPACTIONS:
            raise SettingsError(
                f"compactions={list(self.compactions)}: numbers from 1 to {MOST_COMPACTIONS:,} are needed"
            )

    def cells(self) -> list[Cell]:
        """The cells of each document; the full cache first, since the others are compared with it."""
        ratios = list(dict.fromkeys(float(ratio) for ratio in self.ratios))
        cells: list[Cell] = []
        for place, times in enumerate(sorted(set(self.compactions))):
            cells.append((FULL, None, None, times))
            cells += [(NO_CONTEXT, None, None, times)] if place == 0 else []
            cells += [(choice.label, ratio, choice, times) for choice in self.strategies for ratio in ratios]
        return cells


def evaluate(
    engine: Engine,
    documents: Sequence[Document],
    plan: EvaluationPlan,
    folder: Path,
    on_step: Callable[[Step], None] | None = None,
    progress: Progress | None = None,
) -> list[CellResult]:
    """Measure all cells that the results folder has not, and return the results of all cells of the plan.

    Each is on disk before the next begins, so an evaluation that was stopped goes on where it was. A document is
    prefilled once for all its cells. on_step: told of each cell that was measured. progress: of what its compaction is
    at. Raises what `open_store` raises; a cell that fails is recorded as failed.
    """
    with open_store(folder) as store:
        documents = list({document.digest: document for document in documents}.values())
        todo = [(document, _missing(engine, document, plan, store)) for document in documents]
        clock = _Clock(sum(len(cells) for _, cells in todo))
        if clock.total:
            _warm_up(engine, documents[0])
        for document, cells in todo:
            if cells:
                store.keep_document(document)
            run = DocumentRun(engine, document, _metrics(cells, plan), plan.seed, progress=progress)
            for (label, ratio, choice, times), key, _ in cells:
                run = run.after(times)
                result = run.measure(label, ratio, choice, store.checkpoints(key))
                store.add(result)
                if result.status == "ok":
                    store.drop_checkpoints(key)
                step = clock.step(result)
                if on_step is not None:
                    on_step(step)
        wanted = [key for document in documents for key in _keys(engine, document, plan)]
        return [store.cells[key] for key in wanted]


def _keys(engine: Engine, document: Document, plan: EvaluationPlan) -> Iterator[CellKey]:
    known = engine.describe()
    for label, ratio, choice, times in plan.cells():
        settings = {} if choice is None else choice.settings
        yield cell_key(
            known.model_fingerprint, known.model_dtype, document.digest, label, settings, ratio, times, plan.seed
        )


def _missing(engine: Engine, document: Document, plan: EvaluationPlan, store: ResultStore) -> list[Missing]:
    """The cells of a document to be measured, each with its key and the result it has already, if any.

    Those without a result, without a metric that is wanted, and failures that are to be retried.
    """
    missing: list[Missing] = []
    for cell, key in zip(plan.cells(), _keys(engine, document, plan), strict=True):
        result = store.cells.get(key)
        if result is None:
            wanted = True
        elif result.status == "failed":
            wanted = plan.retry_failed
        else:
            wanted = not plan.metrics <= {*result.metrics, "answers"}
        if wanted:
            missing.append((cell, key, result))
    return missing


def _metrics(cells: Sequence[Missing], plan: EvaluationPlan) -> frozenset[str]:
    """What is measured of a document: what is wanted, and what its cells have already, so that nothing is lost."""
    known = {metric for _, _, result in cells if result is not None for metric in result.metrics}
    return plan.metrics | (known & set(METRICS)) | {"answers"}


@dataclass
class _Clock:
    """Estimates the time left from what the cells took so far."""

    total: int
    done: int = 0
    begun: float = field(default_factory=time.perf_counter)

    def step(self, cell: CellResult) -> Step:
        self.done += 1
        taken = time.perf_counter() - self.begun
        return Step(cell, self.done, self.total, taken / self.done * (self.total - self.done))


def _warm_up(engine: Engine, document: Document) -> None:
    """Run a few tokens, so that the first document's prefill does not pay for what only the first pass pays for."""
    engine.prefill((engine.beginning() + engine.encode(document.context))[:WARM_UP_TOKENS])
