"""Asking the questions of a document: each is read once behind the cache, then decoded, continued and scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine, PromptBatch
from agentcompact.errors import CacheError, DocumentError
from agentcompact.evaluation.metrics.answers import answer_score, mean_log_probability
from agentcompact.evaluation.records import Question
from agentcompact.evaluation.results import QuestionResult
from agentcompact.settings import SamplingSettings

FIDELITY_TOKENS = 16
"""Tokens of a continuation on which distributions are compared, at most."""


@dataclass(frozen=True)
class Prompt:
    """A question as token ids, with those of its options."""

    question: Question
    token_ids: list[int]
    options: list[list[int]]


@dataclass
class Asked:
    """What the questions gave, in their order.

    continuations: the tokens that distributions are compared on, the cache's own answers unless others were given.
    logits: (tokens, vocabulary) before each of them, empty where they were not asked for.
    """

    results: list[QuestionResult]
    continuations: list[list[int]]
    logits: list[Tensor]


def encode_questions(engine: Engine, questions: Sequence[Question], before: Sequence[int] = ()) -> list[Prompt]:
    """Turn questions into token ids; `before` goes in front of each. Raises DocumentError for an empty option."""
    prompts = []
    for question in questions:
        options = [engine.encode(option) for option in question.options]
        if not all(options):
            raise DocumentError(f"an option of the question {question.question.strip()!r} has no tokens")
        prompts.append(Prompt(question, [*before, *engine.encode(question.question)], options))
    return prompts


def ask(
    engine: Engine,
    cache: CompactedCache,
    prompts: Sequence[Prompt],
    continuations: Sequence[Sequence[int]] | None = None,
    *,
    fidelity: bool = True,
) -> Asked:
    """Answer all questions greedily from a cache, which stays as it is.

    continuations: what the distributions are compared on; the cache's own answers by default. fidelity: whether the
    logits on them are wanted. Raises ContextLengthError where a question does not fit.
    """
    asked = Asked([QuestionResult()] * len(prompts), [[]] * len(prompts), [torch.empty(0, 1)] * len(prompts))
    shared = cache.fork(batch_size=1)
    for indices in _batches(prompts, engine.settings.batch_size):
        part = [prompts[index] for index in indices]
        room = part[0].question.max_new_tokens
        batch = engine.read_prompts(shared.fork(len(part)), [prompt.token_ids for prompt in part], room)
        _check_finite(batch.logits)
        answers = engine.decode_batch(batch.fork(), SamplingSettings(max_new_tokens=room))
        choices = _likeliest_options(engine, batch, part)
        for index, prompt, answer, choice in zip(indices, part, answers, choices, strict=True):
            asked.results[index] = _result(prompt.question, answer.text, choice)
            given = answer.token_ids if continuations is None else continuations[index]
            asked.continuations[index] = list(given[:FIDELITY_TOKENS])
        rows = [row for row, index in enumerate(indices) if asked.continuations[index]]
        if fidelity and rows:
            wanted = [asked.continuations[indices[row]] for row in rows]
            for row, made in zip(rows, engine.continuation_logits(batch.select(rows), wanted), strict=True):
                asked.logits[indices[row]] = made
    return asked


def _check_finite(logits: Tensor) -> None:
    """Raise CacheError for logits that are no numbers: every answer from them would look like one."""
    if not bool(logits.isfinite().all()):
        raise CacheError("the model's logits are not finite here: try another --dtype, float32 or bfloat16")


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[int]]:
    """Split the prompts' numbers into batches of one answer length, of prompts of about the same length."""
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].question.max_new_tokens, len(prompts[i].token_ids)))
    for _, alike in groupby(order, key=lambda i: prompts[i].question.max_new_tokens):
        indices = list(alike)
        yield from (indices[begin : begin + size] for begin in range(0, len(indices), size))


def _result(question: Question, text: str, choice: int | None) -> QuestionResult:
    return QuestionResult(
        kind=question.kind,
        question=question.question.strip(),
        expected=list(question.answers),
        answer=text,
        score=answer_score(text, question.answers, question.match),
        choice=choice,
        choice_score=None if choice is None else float(choice == question.label),
    )


def _likeliest_options(engine: Engine, batch: PromptBatch, prompts: Sequence[Prompt]) -> list[int | None]:
    """Return for each prompt of a batch the option with the highest mean log-probability, None without options."""
    owners = [row for row, prompt in enumerate(prompts) for _ in prompt.options]
    if not owners:
        return [None] * len(prompts)
    options = [option for prompt in prompts for option in prompt.options]
    logits = engine.continuation_logits(batch.select(owners), options)
    scores: list[list[float]] = [[] for _ in prompts]
    for owner, option, made in zip(owners, options, logits, strict=True):
        scores[owner].append(mean_log_probability(made, option))
    return [max(range(len(each)), key=each.__getitem__) if each else None for each in scores]
