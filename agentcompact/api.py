"""The library in three calls: load a model, compact a text, answer questions from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from agentcompact.cache import CompactedCache, PromptFormat
from agentcompact.engines import Engine, Generation, Progress, TransformersEngine, question_ids
from agentcompact.errors import BudgetError, ContextLengthError, DocumentError, SettingsError
from agentcompact.models import LoadedModel
from agentcompact.settings import SamplingSettings, build_settings, resolve_budget
from agentcompact.strategies import CompactionRequest, Strategy, compact_in_blocks, make_strategy

PromptKind = Literal["auto", "chat", "raw"]


def compact(
    model: LoadedModel | Engine,
    text: str,
    strategy: str | Strategy = "attention_matching",
    *,
    ratio: float | None = None,
    budget: int | None = None,
    prompt: PromptKind = "auto",
    focus: str | None = None,
    seed: int = 0,
    document: str = "",
    block: int | None = None,
    rolling: bool = False,
    progress: Progress | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> CompactedCache:
    """Prefill a text and compact its cache.

    ratio: entries before for each one kept, 8 by default; or budget: entries per layer and KV head. prompt: "chat" puts
    the text into the model's chat template, so that questions are asked as a user's; "raw" asks them after the plain
    text; "auto" is chat where the model has a template, but raw for the embedded model, which answers better so.
    document: a name kept in the metadata. block: tokens that are prefilled and compacted at a time, so that memory
    grows with the block and what is kept, not with the text; all at once by default. rolling: each block is compacted
    together with what was kept of those before it, into the whole budget again. checkpoint: a file in which a resumable
    strategy (`ttt`) keeps what it has reached; it stays until you remove it. resume: go on from it if it is there.
    settings: the strategy's own. The report is the last of `cache.metadata.reports`.

    Raises DocumentError for an empty text, ContextLengthError for one that is longer than the model's context,
    BudgetError and SettingsError for what cannot be met.
    """
    method = make_strategy(strategy, **settings)
    if checkpoint is not None:
        _check_resumable(method, block)
    if ratio is None and budget is None:
        ratio = 8.0
    resolve_budget(1, ratio=ratio, budget=budget)
    if rolling and block is None:
        raise BudgetError("rolling compaction goes block by block: give the tokens of a block")
    engine = as_engine(model)
    method.check_engine(engine)
    if block is not None:
        form, ids = _document_ids(engine, text, prompt)
        cache = compact_in_blocks(
            method,
            engine,
            ids,
            block=block,
            ratio=ratio,
            budget=budget,
            rolling=rolling,
            focus=focus,
            seed=seed,
            progress=progress,
        )
        return _described(cache, form, text, document)
    captured = seed if method.reads_prefill_queries else None
    cache = prefill_document(engine, text, prompt=prompt, document=document, capture_seed=captured, progress=progress)
    request = CompactionRequest(
        engine=engine,
        cache=cache,
        budget=resolve_budget(cache.next_position, ratio=ratio, budget=budget),
        focus=focus,
        seed=seed,
        progress=progress,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        resume=resume,
    )
    compacted = method.compact(request).cache
    compacted.captured = None  # up to hundreds of MB; a later compaction captures them again from the token ids
    return compacted


def _check_resumable(method: Strategy, block: int | None) -> None:
    """Raise SettingsError where a compaction keeps no checkpoints."""
    if block is not None or not method.resumable:
        what = "compaction in blocks" if method.resumable else f"strategy '{method.name}'"
        raise SettingsError(f"{what} keeps no checkpoints: leave out checkpoint and resume")


def compact_many(
    model: LoadedModel | Engine,
    texts: Sequence[str],
    strategy: str | Strategy = "attention_matching",
    *,
    documents: Sequence[str] = (),
    **options: Any,
) -> Iterator[CompactedCache]:
    """Compact several texts one after another, giving each cache as soon as it is there.

    documents: their names. options: those of `compact`, the strategy's settings among them. All texts are checked
    before the first is read. A pass of one document fills a processor, so nothing is gained by reading them side by
    side; memory is that of one at a time, where the caller keeps none.
    """
    names = list(documents) or [""] * len(texts)
    if len(names) != len(texts):
        raise DocumentError(f"{len(texts)} texts have {len(names)} names: give one for each")
    if options.get("checkpoint") is not None and len(texts) > 1:
        raise SettingsError("several texts cannot share one checkpoint: compact them one by one")
    engine = as_engine(model)
    for number, text in enumerate(texts, start=1):
        _check_text(text, f"document {number}")
    return (compact(engine, text, strategy, document=name, **options) for text, name in zip(texts, names, strict=True))


def recompact(
    model: LoadedModel | Engine,
    cache: CompactedCache,
    strategy: str | Strategy = "attention_matching",
    *,
    ratio: float | None = None,
    budget: int | None = None,
    start: int = 0,
    stop: int | None = None,
    focus: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> CompactedCache:
    """Compact a cache that exists, compacted before or not; a ratio or a budget must be given.

    The ratio counts against the logical tokens of [start, stop), all of the cache by default: 16 after 8 halves it.
    """
    stop = cache.next_position if stop is None else stop
    request = CompactionRequest(
        engine=as_engine(model),
        cache=cache,
        budget=resolve_budget(stop - start, ratio=ratio, budget=budget),
        start=start,
        stop=stop,
        focus=focus,
        seed=seed,
        progress=progress,
    )
    return make_strategy(strategy, **settings).compact(request).cache


def prefill_document(
    engine: Engine,
    text: str,
    *,
    prompt: PromptKind = "auto",
    document: str = "",
    capture_seed: int | None = None,
    progress: Progress | None = None,
) -> CompactedCache:
    """Prefill a text as questions will be asked about it; arguments as for `compact`."""
    form, ids = _document_ids(engine, text, prompt)
    return _described(engine.prefill(ids, capture_seed=capture_seed, progress=progress), form, text, document)


def _document_ids(engine: Engine, text: str, prompt: PromptKind) -> tuple[PromptFormat, list[int]]:
    """Return the format that questions will be asked in, and the token ids of the text in it."""
    _check_text(text, "the document")
    form = prompt_format(engine, prompt)
    before = engine.encode(form.prefix, control_tokens=True) if form.kind == "chat" else engine.beginning()
    return form, [*before, *engine.encode(text)]


def _described(cache: CompactedCache, form: PromptFormat, text: str, document: str) -> CompactedCache:
    """Write into a cache's metadata what it was made from."""
    cache.metadata.prompt = form
    cache.metadata.document = document
    cache.metadata.document_sha256 = hashlib.sha256(text.encode()).hexdigest()
    cache.metadata.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    cache.metadata.library_version = library_version()
    return cache


def answer(
    model: LoadedModel | Engine,
    cache: CompactedCache,
    questions: str | Sequence[str],
    *,
    sampling: SamplingSettings | None = None,
    on_token: Callable[[int, int], None] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> list[Generation]:
    """Answer questions from a cache, together in batches over its one shared span; the cache stays as it is.

    settings: those of `SamplingSettings`, max_new_tokens=64 say. on_token: called with the question's number and each
    token id. Raises DocumentError for an empty question, ContextLengthError where question and answer do not fit.
    """
    engine = as_engine(model)
    sampling = sampling or build_settings(SamplingSettings, settings, "sampling")
    sampling = sampling.model_copy(update={"stop": (*sampling.stop, *cache.metadata.prompt.stop)})
    asked = [questions] if isinstance(questions, str) else list(questions)
    for question in asked:
        _check_text(question, "a question")
    prompts = [question_ids(engine, cache.metadata.prompt, question) for question in asked]
    for index, prompt in enumerate(prompts):
        try:
            engine.check_room(cache.next_position, len(prompt), sampling.max_new_tokens)
        except ContextLengthError as error:
            raise ContextLengthError(f"question {index + 1}: {error}" if len(prompts) > 1 else str(error)) from error
    order = sorted(range(len(asked)), key=lambda index: len(prompts[index]))
    answers: dict[int, Generation] = {}
    shared = cache.fork(batch_size=1)
    for begin in range(0, len(order), engine.settings.batch_size):
        batch = order[begin : begin + engine.settings.batch_size]
        told = None if on_token is None else _renumbered(on_token, batch)
        made = engine.decode(shared.fork(len(batch)), [prompts[index] for index in batch], sampling, told)
        answers.update(zip(batch, made, strict=True))
        if progress is not None:
            progress("answering", len(answers), len(asked))
    return [answers[index] for index in range(len(asked))]


def prompt_format(engine: Engine, kind: PromptKind) -> PromptFormat:
    """Return the text around a document and its questions. Raises DocumentError for "chat" without a template."""
    if kind == "auto" and engine.prefers_raw_prompts:
        kind = "raw"
    parts = None if kind == "raw" else engine.prompt_parts()
    if parts is None:
        if kind == "chat":
            raise DocumentError("the model has no chat template that a document can be put into: use raw prompts")
        return PromptFormat()
    return PromptFormat(kind="chat", prefix=parts.prefix, before_question="\n\n", after_question=parts.suffix, stop=())


def as_engine(model: LoadedModel | Engine) -> Engine:
    """Return an engine for a loaded model, or the engine that was handed in."""
    return TransformersEngine(model) if isinstance(model, LoadedModel) else model


def _check_text(text: str, name: str) -> None:
    """Raise DocumentError for a text without a word, or with half characters that no encoding has."""
    if not text.strip():
        raise DocumentError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"{name} is not UTF-8: character {error.start + 1:,} is none") from error


def library_version() -> str:
    try:
        return version("agentcompact")
    except PackageNotFoundError:
        return "not installed"


def _renumbered(on_token: Callable[[int, int], None], numbers: list[int]) -> Callable[[int, int], None]:
    return lambda row, token: on_token(numbers[row], token)
