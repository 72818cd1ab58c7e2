"""The model's own summary in place of the text: what most agents do today when their context is full."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field, StringConstraints

from agentcompact.cache import CompactedCache, Report, SlidingLayer, Span
from agentcompact.engines import Engine, question_ids
from agentcompact.errors import BudgetError, CacheError, ContextLengthError
from agentcompact.settings import SamplingSettings
from agentcompact.strategies.base import CompactionRequest, Phases, Strategy, StrategySettings
from agentcompact.strategies.summary_prompts import (
    INSTRUCTIONS,
    finish_request,
    framed,
    summary_request,
    until_stop,
    words_in,
)

SHORTEST = 16
"""Tokens that a summary is given at least."""
OPENING = 8
"""Tokens of the span that are quoted to say where a summary begins, if text before it is kept."""


class SummarySettings(StrategySettings):
    instructions: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] | None = Field(
        None, description="what to ask for instead of the built-in wording; length and focus are added"
    )
    attempts: int = Field(2, ge=0, le=20, description="times that a summary is continued that has not come to its end")
    temperature: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy")


class Summary(Strategy):
    """Asks the model for a summary behind its cache, and prefills that in place of the text.

    What the summary leaves out is lost, and positions begin anew: the next one is the length of the new text, of at
    most `budget` tokens for the span with the line that introduces the summary. Text before and after the span stays.
    A summary that is empty, or cut because it does not end within the budget, is refused and nothing has changed.
    """

    name = "summary"
    summary = "the model's own text summary as the new context; loses what it leaves out, needs to decode"
    settings_type = SummarySettings
    settings: SummarySettings
    rewrites = True

    @property
    def takes_focus(self) -> bool:
        return True

    def compact_cache(
        self, request: CompactionRequest, spans: list[Span], phases: Phases, report: Report
    ) -> tuple[CompactedCache, list[Span]]:
        """Write the summary and read it in place of the span.

        Raises BudgetError where no summary fits the budget, ContextLengthError where the context has no room to ask
        for one, CacheError where the token ids are not known, or the summary is empty or does not end.
        """
        engine, cache, budget = request.engine, request.cache, request.budget
        if len(cache.token_ids) != cache.next_position:
            raise CacheError("a summary needs the cache's token ids, and they are not known: prefill the text again")
        first = format_ids(engine, cache)[request.start :]
        around = len(first) + len(self._framed_ids(request, ""))
        if budget < around + SHORTEST:
            raise BudgetError(
                f"budget {budget:,} is too small for a summary: the text around it takes {around:,} tokens and the "
                f"summary at least {SHORTEST}, so give {around + SHORTEST:,} or more"
            )
        with engine.counters.as_compaction():
            with phases.phase("summarise"):
                report.summary = self._write(request, budget - around, report)
            new_ids = [*first, *self._framed_ids(request, report.summary)]
            if len(new_ids) > budget:
                raise unfinished(budget - around)
            with phases.phase("prefill"):
                before = cache_before(engine, cache, request.start)
                made = engine.prefill([*new_ids, *cache.token_ids[request.end :]], before, progress=request.progress)
        made.metadata = cache.metadata.model_copy(deep=True)
        made.captured = None
        stop = request.start + len(new_ids)
        return made, [made.source(index, request.start, stop) for index, _ in made.full_layers]

    def compact_spans(
        self, request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
    ) -> list[Span]:
        """A summary is no span of the old text's entries. Raises CacheError."""
        raise CacheError("a summary is a text of its own and has no entries of the old one: use compact")

    def _write(self, request: CompactionRequest, room: int, report: Report) -> str:
        """Return a summary of at most `room` tokens that came to its end."""
        engine, form = request.engine, request.cache.metadata.prompt
        instructions, opening = self.settings.instructions or INSTRUCTIONS, quoted_opening(request)
        asked = summary_request(instructions, words_in(self._share(room, 0)), request.focus, opening)
        shared = text_to_summarise(request, report)
        longest = len(question_ids(engine, form, finish_request(asked, room)))
        free = engine.geometry.max_positions - shared.next_position - longest
        if free < min(room, SHORTEST):
            raise ContextLengthError(
                f"there is no room to ask for a summary: {shared.next_position:,} tokens, a request of {longest:,} and "
                f"a summary of at least {SHORTEST} do not fit the model's context of "
                f"{engine.geometry.max_positions:,}: compact earlier, or take another strategy or a longer context"
            )
        if free < room:
            report.warnings.append(
                f"the model's context leaves {free:,} tokens for the summary, of {room:,} it may take"
            )
            room = free
            asked = summary_request(instructions, words_in(self._share(room, 0)), request.focus, opening)
        return self._continued(request, shared, asked, room)

    def _continued(self, request: CompactionRequest, shared: CompactedCache, asked: str, room: int) -> str:
        """Ask for a summary, and again for the rest of it until it has come to its end."""
        engine, form = request.engine, request.cache.metadata.prompt
        stops = tuple(stop for stop in form.stop if stop.strip())  # an empty line may part two of its paragraphs
        written: list[int] = []
        for attempt in range(self.settings.attempts + 1):
            most = self._share(room - len(written), attempt)
            question = finish_request(asked, words_in(most)) if written else asked
            sampling = SamplingSettings(
                max_new_tokens=most,
                temperature=self.settings.temperature,
                seed=request.seed % 2**63,
                stop=stops,
            )
            # The beginning stands behind the question as if just written, so that the rest joins it without a seam.
            prompt = [*question_ids(engine, form, question), *written]
            told = _told(request, len(written), room)
            (made,) = engine.decode(shared.fork(), [prompt], sampling, told)
            written += made.token_ids
            text, stopped = until_stop(engine.decode_text(written), stops)
            if stopped or made.finish_reason != "length":
                if not text.strip():
                    raise CacheError("the model wrote an empty summary: give other instructions, or another strategy")
                return text.strip()
            if len(written) >= room:
                break
        raise unfinished(room)

    def _share(self, room: int, attempt: int) -> int:
        """Return how many of the tokens left a try may take: all in the last, so that others leave some to continue."""
        return room if attempt == self.settings.attempts else max(1, room * 3 // 4)

    def _framed_ids(self, request: CompactionRequest, summary: str) -> list[int]:
        goes_on = request.end < request.cache.next_position
        return request.engine.encode(framed(summary, follows=request.start > 0, goes_on=goes_on))


def format_ids(engine: Engine, cache: CompactedCache) -> list[int]:
    """Return the tokens that the prompt format puts before a document, if the cache begins with them."""
    form = cache.metadata.prompt
    ids = engine.encode(form.prefix, control_tokens=True) if form.kind == "chat" else engine.beginning()
    return ids if cache.token_ids[: len(ids)] == ids else []


def quoted_opening(request: CompactionRequest) -> str:
    """Return the first words of the span where other text comes before it, else nothing."""
    engine, ids = request.engine, request.cache.token_ids
    if request.start <= len(format_ids(engine, request.cache)):
        return ""
    return engine.decode_text(ids[request.start : min(request.start + OPENING, request.end)])


def text_to_summarise(request: CompactionRequest, report: Report) -> CompactedCache:
    """Return a fork of the cache that ends with the span, or where that cannot be, with all that it holds."""
    fork = request.cache.fork()
    try:
        fork.truncate(request.end)
    except CacheError:
        report.warnings.append(
            "sliding-window layers cannot go back to the end of the span, so the summary was asked for behind all of it"
        )
    return fork.fork(batch_size=1)


def cache_before(engine: Engine, cache: CompactedCache, start: int) -> CompactedCache:
    """Return a cache of the tokens before `start`, with their entries as they are.

    Raises CacheError where they are part of a compacted span and cannot be taken out of it.
    """
    if start == 0:
        return engine.new_cache()
    kept = cache.fork()
    if start >= cache.span_tokens:
        try:
            kept.truncate(start)
        except CacheError:
            if cache.is_compacted:
                raise
            return engine.prefill(cache.token_ids[:start])
        return kept
    spans = [cache.source(index, 0, start) for index, _ in cache.full_layers]
    if min(min(span.lengths) for span in spans) == 0 or any(isinstance(layer, SlidingLayer) for layer in kept.layers):
        raise CacheError(
            f"position {start:,} lies inside the {cache.span_tokens:,} tokens that are compacted already, and what is "
            "before it cannot be kept apart: summarise from 0"
        )
    for (_, layer), span in zip(kept.full_layers, spans, strict=True):
        layer.hold(span, start)
    del kept.token_ids[start:]
    return kept


def unfinished(room: int) -> CacheError:
    """Return the error for a summary that would have to be cut."""
    return CacheError(
        f"the summary did not end within its {room:,} tokens and a cut one is not kept: give a larger budget, other "
        "instructions, or another strategy"
    )


def _told(request: CompactionRequest, before: int, room: int) -> Callable[[int, int], None] | None:
    """Return what reports each token of the summary as progress."""
    progress, count = request.progress, itertools.count(before + 1)
    return None if progress is None else lambda _, __: progress("summary: writing", next(count), room)
