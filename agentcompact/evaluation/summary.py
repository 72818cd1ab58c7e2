"""One row per model, task, strategy and ratio, out of the cells of an evaluation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from agentcompact.evaluation.results import FULL, NO_CONTEXT, CellResult, QuestionResult, latest
from agentcompact.evaluation.statistics import bootstrap_interval, normalised_utility

Document = list[CellResult]
"""The cells that worked of one document, strategy and ratio: one a seed."""
DocumentKey = tuple[str, str, str, str]
Documents = dict[DocumentKey, Document]
Score = Callable[[QuestionResult], "float | None"]


class KindScore(BaseModel):
    """How the questions of one kind went: those with answers, and those with options (choices)."""

    model_config = ConfigDict(frozen=True)

    questions: int
    choices: int = 0
    accuracy: float | None = None
    choice_accuracy: float | None = None


class SummaryRow(BaseModel):
    """What one strategy at one ratio gave for one model, task, length and number of compactions; None if not measured.

    documents: those that worked. questions, choices: those scored by their answers, and by their options. failed:
    cells that did not, error the first one's. accuracy: mean score of all questions, low and high its 95 %
    interval; a question asked with several seeds counts once, with its mean. utility: 100 for the full cache and 0
    without the document, over documents that worked with all three. compaction_per_prefill: compaction seconds as a
    multiple of prefill seconds. reached_ratio: the full cache's held positions over this one's. relative_decode:
    decoding speed over the full cache's.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    dtype: str
    task: str
    length: int | None
    compactions: int
    strategy: str
    ratio: float | None
    documents: int
    failed: int = 0
    error: str | None = None
    questions: int = 0
    choices: int = 0
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    choice_accuracy: float | None = None
    choice_low: float | None = None
    choice_high: float | None = None
    utility: float | None = None
    choice_utility: float | None = None
    kl: float | None = None
    top1: float | None = None
    output_error: float | None = None
    mass_error: float | None = None
    log_mass_error: float | None = None
    overlap: float | None = None
    compaction_seconds: float | None = None
    compaction_per_prefill: float | None = None
    entries: float | None = None
    bytes: float | None = None
    held_positions: float | None = None
    reached_ratio: float | None = None
    decode_tokens_per_second: float | None = None
    relative_decode: float | None = None
    kinds: dict[str, KindScore] = Field(default_factory=dict)


class RowKey(NamedTuple):
    """Which cells make up a row."""

    model: str
    dtype: str
    task: str
    length: int | None
    compactions: int
    strategy: str
    ratio: float | None


class _Scores(NamedTuple):
    asked: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None


def summarise(cells: Sequence[CellResult]) -> list[SummaryRow]:
    """Make the rows: by model, task and length; then full, the others by ratio and strategy, and no_context."""
    every = list(latest(cells).values())
    models, labels = _model_names(every), _labels(every)
    groups: dict[RowKey, list[CellResult]] = defaultdict(list)
    for cell in every:
        name, label = models[cell.fingerprint], labels[_settings_key(cell)]
        groups[RowKey(name, cell.dtype, cell.task, cell.length, cell.compactions, label, cell.ratio)].append(cell)
    full = {
        times: _documents(cell for cell in every if cell.strategy == FULL and cell.compactions == times)
        for times in {cell.compactions for cell in every}
    }
    none = _documents(cell for cell in every if cell.strategy == NO_CONTEXT)
    return [_row(key, groups[key], full[key.compactions], none) for key in sorted(groups, key=_order)]


def named_alike(cells: Sequence[CellResult]) -> list[CellResult]:
    """Return the cells that count, each under its model's one name and its strategy's unmistakable label."""
    every = list(latest(cells).values())
    models, labels = _model_names(every), _labels(every)
    return [
        cell.model_copy(update={"model": models[cell.fingerprint], "strategy": labels[_settings_key(cell)]})
        for cell in every
    ]


def _model_names(cells: Sequence[CellResult]) -> dict[str, str]:
    """Name each model, known by its fingerprint, as it was called last; two of one name are told apart."""
    last = {cell.fingerprint: cell.model for cell in cells}
    taken = Counter(last.values())
    return {mark: name if taken[name] == 1 else f"{name} {mark[:8]}" for mark, name in last.items()}


def _settings_key(cell: CellResult) -> tuple[str, str]:
    return cell.strategy, json.dumps(cell.settings, sort_keys=True)


def _labels(cells: Sequence[CellResult]) -> dict[tuple[str, str], str]:
    """Label each strategy; settings that differ under one label (other defaults, another file) are added to it."""
    variants: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for cell in cells:
        variants[cell.strategy][_settings_key(cell)[1]] = cell.settings
    labels = {}
    for strategy, found in variants.items():
        names = sorted({name for settings in found.values() for name in settings})
        # A setting that only some have came with a later version, and says nothing of the others.
        differing = [
            name for name in names if len({json.dumps(each[name]) for each in found.values() if name in each}) > 1
        ]
        for written, settings in found.items():
            extra = [f"{name}={str(settings[name])[:16]}" for name in differing if name in settings]
            labels[strategy, written] = ":".join([strategy, *extra])
    return labels


def _order(key: RowKey) -> tuple[str, str, str, int, int, int, float, str]:
    place = {FULL: 0, NO_CONTEXT: 2}.get(key.strategy, 1)
    length = -1 if key.length is None else key.length
    return (key.model, key.dtype, key.task, length, key.compactions, place, key.ratio or 0.0, key.strategy)


def _documents(cells: Iterable[CellResult]) -> Documents:
    documents: Documents = defaultdict(list)
    for cell in cells:
        if cell.status == "ok":
            documents[cell.fingerprint, cell.dtype, cell.task, cell.digest].append(cell)
    return dict(documents)


def _row(key: RowKey, cells: list[CellResult], full: Documents, none: Documents) -> SummaryRow:
    own = _documents(cells)
    failures = [cell for cell in cells if cell.status == "failed"]
    accuracy, choice = _scores(own, _accuracy), _scores(own, _choice)
    return SummaryRow(
        **key._asdict(),
        documents=len(own),
        failed=len(failures),
        error=(failures[0].error or "no reason given") if failures else None,
        questions=accuracy.asked,
        choices=choice.asked,
        accuracy=accuracy.mean,
        accuracy_low=accuracy.low,
        accuracy_high=accuracy.high,
        choice_accuracy=choice.mean,
        choice_low=choice.low,
        choice_high=choice.high,
        utility=_utility(own, full, none, _accuracy),
        choice_utility=_utility(own, full, none, _choice),
        kl=_mean_of(own, lambda cell: cell.kl),
        top1=_mean_of(own, lambda cell: cell.top1),
        output_error=_mean_of(own, lambda cell: cell.output_error),
        mass_error=_mean_of(own, lambda cell: cell.mass_error),
        log_mass_error=_mean_of(own, lambda cell: cell.log_mass_error),
        overlap=_mean_of(own, lambda cell: cell.overlap),
        compaction_seconds=_mean_of(own, lambda cell: cell.compaction_seconds),
        compaction_per_prefill=_mean_of(own, lambda cell: _quotient(cell.compaction_seconds, cell.prefill_seconds)),
        entries=_mean_of(own, _entries),
        bytes=_mean_of(own, lambda cell: cell.bytes),
        held_positions=_mean_of(own, _held),
        reached_ratio=_relative(full, own, _held),
        decode_tokens_per_second=_mean_of(own, _speed),
        relative_decode=_relative(own, full, _speed),
        kinds=_kinds(own),
    )


def _accuracy(question: QuestionResult) -> float | None:
    return question.score


def _choice(question: QuestionResult) -> float | None:
    return question.choice_score


def _held(cell: CellResult) -> float | None:
    return cell.held_positions


def _speed(cell: CellResult) -> float | None:
    return cell.decode_tokens_per_second


def _entries(cell: CellResult) -> float | None:
    return None if cell.entries_per_head is None else float(sum(map(sum, cell.entries_per_head)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None and b > 0 else None


def _mean_of(documents: Documents, measure: Callable[[CellResult], float | None]) -> float | None:
    """Mean over documents of each one's mean over seeds."""
    return _mean(_mean(map(measure, document)) for document in documents.values())


def _relative(above: Documents, below: Documents, measure: Callable[[CellResult], float | None]) -> float | None:
    """Mean quotient over the documents that both have."""
    return _mean(
        _quotient(_mean(map(measure, above[key])), _mean(map(measure, below[key]))) for key in above if key in below
    )


def _question_scores(document: Document, score: Score, kind: str | None = None) -> list[float]:
    """Each question's mean over seeds; of one kind, or all. Questions without a score are left out."""
    scores = []
    for index in range(max(len(cell.questions) for cell in document)):
        asked = [cell.questions[index] for cell in document if index < len(cell.questions)]
        mean = _mean(score(question) for question in asked if kind in (None, question.kind))
        if mean is not None:
            scores.append(mean)
    return scores


def _scores(documents: Documents, score: Score) -> _Scores:
    groups = [_question_scores(document, score) for document in documents.values()]
    mean = _mean(value for group in groups for value in group)
    return _Scores() if mean is None else _Scores(sum(map(len, groups)), mean, *bootstrap_interval(groups))


def _utility(own: Documents, full: Documents, none: Documents, score: Score) -> float | None:
    shared = [key for key in own if key in full and key in none]
    means = [
        _mean(value for key in shared for value in _question_scores(documents[key], score))
        for documents in (own, full, none)
    ]
    accuracy, best, worst = means
    if accuracy is None or best is None or worst is None:
        return None
    return normalised_utility(accuracy, best, worst)


def _kinds(documents: Documents) -> dict[str, KindScore]:
    kinds = sorted({q.kind for document in documents.values() for cell in document for q in cell.questions})
    return {kind: _kind_score(documents, kind) for kind in kinds} if any(kinds) else {}


def _kind_score(documents: Documents, kind: str) -> KindScore:
    scores = [s for d in documents.values() for s in _question_scores(d, _accuracy, kind)]
    choices = [s for d in documents.values() for s in _question_scores(d, _choice, kind)]
    return KindScore(
        questions=len(scores), choices=len(choices), accuracy=_mean(scores), choice_accuracy=_mean(choices)
    )
