"""Self-study reference queries: those of the model's own questions and answers about what it has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcompact.cache import CapturedQueries, CompactedCache, PromptFormat
from agentcompact.engines import CAPTURES_QUERIES, Engine, Progress, question_ids
from agentcompact.errors import CapabilityError, ContextLengthError, SettingsError
from agentcompact.queries.self_study_prompts import StudyPrompt, study_prompts
from agentcompact.settings import SamplingSettings

PROMPTS = 24
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Study:
    """What the model asks and answers: how many prompts, how long the answers are, and what they should be about."""

    prompts: int = PROMPTS
    answer_tokens: int = ANSWER_TOKENS
    temperature: float = 0.0
    focus: str | None = None


DEFAULT_STUDY = Study()


def self_study_queries(
    engine: Engine,
    cache: CompactedCache,
    start: int,  # noqa: ARG001 - one signature for every kind
    stop: int,  # noqa: ARG001
    seed: int,
    progress: Progress | None = None,
    study: Study = DEFAULT_STUDY,
) -> CapturedQueries:
    """Let the model summarise, list, structure and question what the cache holds; return the queries of all that.

    The study's requests are answered in batches over one shared cache; the questions among the answers are then
    asked and answered too. The queries are those of prompts and answers, each turn read behind the cache on its
    own; at most the engine's `capture_bytes` of them are kept. The prompts are about all of the cache, whatever
    part [start, stop) of it is compacted. A focus adds prompts about it. With temperature 0 the answers are greedy,
    the seed decides only which prompts are used, and none is used twice.

    The cache stays as it is, and all tokens count as compaction work. Raises ContextLengthError where the model's
    context has no room behind the cache, CapabilityError where the engine captures nothing.
    Source: Fast KV Compaction via Attention Matching (Zweiger et al. 2026), self-study after Cartridges (Eyuboglu et
    al. 2025).
    """
    turns = self_study_turns(engine, cache, seed, progress, study)
    return engine.capture(turns, seed, after=cache, progress=progress)


def self_study_turns(
    engine: Engine,
    cache: CompactedCache,
    seed: int,
    progress: Progress | None = None,
    study: Study = DEFAULT_STUDY,
) -> list[list[int]]:
    """Return the token ids of the model's requests and answers, as `self_study_queries` reads them."""
    return [[*prompt, *answer] for prompt, answer in self_study_pairs(engine, cache, seed, progress, study)]


def self_study_pairs(
    engine: Engine,
    cache: CompactedCache,
    seed: int,
    progress: Progress | None = None,
    study: Study = DEFAULT_STUDY,
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each request, or question that the model asked itself, and of its answer."""
    if CAPTURES_QUERIES not in engine.capabilities:
        raise CapabilityError("self-study needs reference queries, and the engine cannot capture any")
    if study.prompts < 1:
        raise SettingsError(f"self-study needs one prompt at least, not {study.prompts}")
    form = cache.metadata.prompt
    chosen = study_prompts(study.prompts, seed, study.focus)
    if study.temperature == 0:  # a request made twice would get the same answer
        chosen = list(dict.fromkeys(chosen))
    requests = [_request_ids(engine, form, prompt) for prompt in chosen]
    _check_room(engine, cache, requests, study.answer_tokens)
    sampling = SamplingSettings(
        max_new_tokens=study.answer_tokens, temperature=study.temperature, seed=seed % 2**63, stop=form.stop
    )
    with engine.counters.as_compaction():
        return _study(engine, cache, list(zip(chosen, requests, strict=True)), sampling, progress)


def _study(
    engine: Engine,
    cache: CompactedCache,
    requests: Sequence[tuple[StudyPrompt, list[int]]],
    sampling: SamplingSettings,
    progress: Progress | None,
) -> list[tuple[list[int], list[int]]]:
    """Answer the requests, then the questions among the answers; return each prompt and its answer."""
    shared = cache.fork(batch_size=1)
    answers = _answers(engine, shared, [ids for _, ids in requests], sampling, progress)
    pairs = zip(requests, answers, strict=True)
    asked = dict.fromkeys(_question(prompt, text) for (prompt, _), (text, _) in pairs if prompt.asks)
    questions = [question_ids(engine, cache.metadata.prompt, text) for text in asked]
    questions = _that_fit(engine, cache, questions, sampling.max_new_tokens)
    replies = _answers(engine, shared, questions, sampling, progress)
    before = [*(ids for _, ids in requests), *questions]
    return [(ids, after) for ids, (_, after) in zip(before, [*answers, *replies], strict=True)]


def _request_ids(engine: Engine, form: PromptFormat, prompt: StudyPrompt) -> list[int]:
    """Return the token ids of a request with the opening of its answer."""
    space = "" if not form.after_question or form.after_question[-1].isspace() else " "
    return [*question_ids(engine, form, prompt.text), *engine.encode(space + prompt.opening)]


def _question(prompt: StudyPrompt, answer: str) -> str:
    """Return the question that an answer is: its first line, up to the first question mark."""
    line = (prompt.opening + answer).strip().split("\n")[0]
    question, mark, _ = line.partition("?")
    return question + mark


def _answers(
    engine: Engine,
    shared: CompactedCache,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    progress: Progress | None,
) -> list[tuple[str, list[int]]]:
    """Answer prompts in batches; return the text and the token ids of each answer."""
    answers: list[tuple[str, list[int]]] = []
    size = engine.settings.batch_size
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        batch = engine.read_prompts(shared.fork(batch_size=len(part)), part, sampling.max_new_tokens)
        seeded = sampling.model_copy(update={"seed": (sampling.seed + first) % 2**63})
        answers.extend((each.text, each.token_ids) for each in engine.decode_batch(batch, seeded))
        if progress is not None:
            progress("self-study", len(answers), len(prompts))
    return answers


def _check_room(engine: Engine, cache: CompactedCache, prompts: Sequence[list[int]], answer_tokens: int) -> None:
    """Raise ContextLengthError where a prompt and its answer do not fit behind the cache."""
    if len(_that_fit(engine, cache, prompts, answer_tokens)) < len(prompts):
        needed = max(len(prompt) for prompt in prompts) + answer_tokens
        raise ContextLengthError(
            f"self-study needs room for {needed:,} tokens behind the {cache.next_position:,} in the model's context of "
            f"{engine.geometry.max_positions:,}: use queries=context_prefill, or a model with a longer context"
        )


def _that_fit(
    engine: Engine, cache: CompactedCache, prompts: Sequence[list[int]], answer_tokens: int
) -> list[list[int]]:
    room = engine.geometry.max_positions - cache.next_position - answer_tokens
    return [prompt for prompt in prompts if len(prompt) <= room]
