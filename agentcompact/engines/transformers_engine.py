"""The engine over a Hugging Face causal language model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentcompact.cache import (
    ATTENTION_NAME,
    CacheMetadata,
    CapturedQueries,
    CompactedCache,
    Span,
    register_attention,
)
from agentcompact.engines.base import (
    CAPTURES_INPUT_NORMS,
    CAPTURES_QUERIES,
    GIVES_GRADIENTS,
    GIVES_OUTPUT_NORMS,
    ROTATES_STATES,
    EngineCounters,
    Generation,
    Progress,
    TokenConstraint,
)
from agentcompact.engines.forced import ForcedReading
from agentcompact.engines.projections import InputNorms, OutputProjections
from agentcompact.engines.prompt_batch import PromptBatch, padded_rows
from agentcompact.engines.rotary import Rotary
from agentcompact.engines.sampling import Sampler, StopWatch, end_token_ids
from agentcompact.errors import CacheError, ContextLengthError, DocumentError
from agentcompact.models import LoadedModel, PromptParts, render_chat, split_template
from agentcompact.models.support import attention_modules
from agentcompact.settings import EngineSettings, SamplingSettings


class TransformersEngine(ForcedReading):
    """Runs a loaded model over caches. It sets the model's attention implementation to ours, once."""

    capabilities = frozenset(
        {CAPTURES_QUERIES, GIVES_GRADIENTS, ROTATES_STATES, GIVES_OUTPUT_NORMS, CAPTURES_INPUT_NORMS}
    )

    def __init__(self, model: LoadedModel, settings: EngineSettings | None = None) -> None:
        register_attention()
        self.model = model
        self.geometry = model.geometry
        self.settings = settings or EngineSettings()
        self.counters = EngineCounters()
        # Measured on the demo document: 24 of 24 questions right after the plain text, 17 in the chat template.
        self.prefers_raw_prompts = model.source.kind == "embedded"
        self.config = model.causal_lm.config.get_text_config(decoder=True)
        if self.config._attn_implementation != ATTENTION_NAME:
            model.causal_lm.set_attn_implementation(ATTENTION_NAME)

    def new_cache(self) -> CompactedCache:
        cache = CompactedCache(self.geometry, self.config)
        cache.metadata = self.describe()
        return cache

    def describe(self) -> CacheMetadata:
        return CacheMetadata(
            model_source=self.model.source.identity,
            model_type=self.geometry.model_type,
            model_fingerprint=self.model.fingerprint,
            model_dtype=str(self.model.dtype).removeprefix("torch."),
            tokenizer_hash=self.model.tokenizer_hash,
            rope=self.geometry.rope,
            scaling=self.geometry.scaling,
        )

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        return self.model.encoder.encode(text, control_tokens=control_tokens)

    def beginning(self) -> list[int]:
        return list(self.model.encoder.beginning)

    def prompt_parts(self) -> PromptParts | None:
        return split_template(self.model.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.model.tokenizer, "chat_template", None))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        return render_chat(self.model.tokenizer, messages, tools, generation_prompt=generation_prompt)

    def control_strings(self) -> frozenset[str]:
        return self.model.encoder.control_strings

    def load_cache(self, path: Path) -> CompactedCache:
        return CompactedCache.load(path, self.model)

    def prefill(
        self,
        token_ids: Sequence[int],
        cache: CompactedCache | None = None,
        *,
        capture_seed: int | None = None,
        progress: Progress | None = None,
    ) -> CompactedCache:
        """Append token ids to a cache of one sequence, chunk by chunk.

        With `capture_seed` the queries are captured on the way, as many as the settings' `capture_bytes` hold.
        Raises ContextLengthError where the tokens pass the model's limit; the cache is unchanged after any error.
        """
        cache = self.new_cache() if cache is None else cache
        start, total = cache.next_position, len(token_ids)
        self.check_room(start, total)
        begun = time.perf_counter()
        capture = self._capture_store(cache, start, total, capture_seed)
        cache.reserve(cache.tail_length + total)
        windows = cache.windows()
        known = None if capture is None else capture.snapshot()
        try:
            self._run(token_ids, cache, capture, progress, "prefill")
        except BaseException:
            if capture is not None and known is not None:
                capture.restore(known)
            cache.restore_windows(windows)
            cache.roll_back(start)
            raise
        finally:
            cache.reserve(0)
        cache.captured = cache.captured if capture is None else capture
        cache.token_ids.extend(int(i) for i in token_ids)
        self.counters.prefilled_tokens += total
        cache.metadata.prefill_seconds = (cache.metadata.prefill_seconds or 0) + time.perf_counter() - begun
        return cache

    def capture(
        self,
        turns: Sequence[Sequence[int]],
        seed: int,
        *,
        after: CompactedCache | None = None,
        first: int = 0,
        numbered_from: int = 0,
        progress: Progress | None = None,
    ) -> CapturedQueries:
        store = self._new_store(seed, first)
        if store is None:
            raise CacheError("no queries can be captured: the engine's capture_bytes is too small")
        total, done = sum(len(turn) for turn in turns), 0
        shared = None if after is None else after.fork(batch_size=1)
        with self._input_norms.into(store):
            for turn in turns:
                cache = self.new_cache() if shared is None else shared.fork()
                cache.reserve(len(turn))
                told = None if progress is None else _shifted(progress, done, total)
                self._run(turn, cache, store, told, "reference queries", numbered_from + done, total - done)
                done += len(turn)
        self.counters.compaction_tokens += total
        return store

    def read_rewriting(
        self, turns: Sequence[Sequence[int]], after: CompactedCache, rewrite: Callable[[int, Tensor], Span]
    ) -> None:
        shared = after.fork(batch_size=len(turns))
        layers = dict(shared.full_layers)
        lengths = [len(turn) for turn in turns]

        def replace(index: int, query: Tensor) -> None:
            rows = [each[:, query.shape[2] - length :] for each, length in zip(query, lengths, strict=True)]
            layers[index].span = rewrite(index, torch.cat(rows, dim=1))

        with shared.observed(replace), self.counters.as_compaction():
            self.read_prompts(shared, turns)

    def rotate(self, states: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        return self._rotary.rotate(states, positions, back=back)

    def output_norms(self, layer: int, values: Tensor, heads: range | None = None) -> Tensor:
        return self._projections.norms(layer, values, range(self.geometry.kv_heads) if heads is None else heads)

    def recording_input_norms(self) -> AbstractContextManager[None]:
        return self._input_norms.recording()

    @cached_property
    def _rotary(self) -> Rotary:
        return Rotary.of_model(self.model.causal_lm, self._one_token_keys, self.geometry)

    @cached_property
    def _projections(self) -> OutputProjections:
        return OutputProjections(list(attention_modules(self.model.causal_lm)), self.geometry, self.model.dtype)

    @cached_property
    def _input_norms(self) -> InputNorms:
        modules = list(attention_modules(self.model.causal_lm))
        return InputNorms({index: modules[index] for index in self.geometry.full_layers})

    @torch.no_grad()
    def _one_token_keys(self, position: int) -> list[Tensor]:
        """Keys (kv_heads, 1, head_dim) of the full layers for a sequence of one token at a position."""
        cache = self.new_cache()
        positions = torch.tensor([[position]], device=self.model.device)
        ids = torch.full_like(positions, self.model.causal_lm.get_input_embeddings().num_embeddings // 2)
        self.model.causal_lm(input_ids=ids, cache=cache, position_ids=positions, use_cache=True, logits_to_keep=1)
        return [span.dense(span.keys) for span in (cache.source(index, 0, 1) for index, _ in cache.full_layers)]

    def decode_text(self, token_ids: Sequence[int]) -> str:
        text: str = self.model.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode(
        self,
        cache: CompactedCache,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        on_token: Callable[[int, int], None] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> list[Generation]:
        """Append one prompt to each sequence of the cache and decode an answer to each, all together.

        The cache grows by the prompts and the answers; sequences that have ended leave it, so a cache of several
        sequences is used up. `on_token` is called with the prompt's number and each token id. `constraint` is for a
        single prompt only.
        """
        batch = self.read_prompts(cache, prompts, sampling.max_new_tokens)
        return self.decode_batch(batch, sampling, on_token, constraint)

    def read_prompts(self, cache: CompactedCache, prompts: Sequence[Sequence[int]], room: int = 0) -> PromptBatch:
        """Append one prompt to each sequence of the cache, with room for as many tokens after it."""
        if not prompts or any(len(prompt) == 0 for prompt in prompts):
            raise DocumentError("there is nothing to answer: a prompt has no tokens")
        longest = max(len(prompt) for prompt in prompts)
        start = cache.next_position
        self.check_room(start, longest, room)
        single = len(prompts) == 1 and len(cache.token_ids) == start
        ids, padding, seen = padded_rows(prompts, start, self.model.device)
        if seen is not None:
            cache.set_gaps(start, padding)
        cache.reserve(cache.tail_length + longest + room)
        logits = self._step(ids, cache, padding, seen)[:, -1]
        cache.token_ids = [*cache.token_ids, *prompts[0]] if single else []
        self.counters.prefilled_tokens += sum(len(prompt) for prompt in prompts)
        return PromptBatch(cache, logits, padding, seen)

    def decode_batch(
        self,
        batch: PromptBatch,
        sampling: SamplingSettings,
        on_token: Callable[[int, int], None] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> list[Generation]:
        """Decode an answer to each prompt of a batch; the batch is used up. constraint: for a single prompt only."""
        cache = batch.cache
        if constraint is not None and batch.rows > 1:
            raise CacheError("a constraint is for one answer at a time: decode the prompts one by one")
        self.check_room(cache.next_position, 0, sampling.max_new_tokens)
        single = batch.rows == 1 and len(cache.token_ids) == cache.next_position
        sampler = Sampler(sampling, self.model.device)
        watch = StopWatch(self.model.tokenizer, sampling, end_token_ids(self.model), batch.rows)
        active, logits = list(range(batch.rows)), batch.logits
        while True:
            if constraint is None:
                tokens = sampler(logits)
            else:
                tokens = sampler(constraint.allow(logits))
                tokens[0] = constraint.take(int(tokens[0]))
            going = [
                row for row, token in enumerate(tokens.tolist()) if self._accept(watch, active[row], token, on_token)
            ]
            self.counters.decoded_tokens += len(active)
            if not going:
                break
            if len(going) < len(active):
                active, tokens = [active[row] for row in going], tokens[going]
                batch.keep(going)
            batch.lengthen(1)
            logits = self._step(tokens[:, None], cache, batch.padding, batch.seen)[:, -1]
            cache.token_ids = [*cache.token_ids, int(tokens[0])] if single else []
        cache.reserve(0)
        return watch.generations

    def continuation_logits(self, batch: PromptBatch, continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return what predicts each token of one continuation a row, (tokens, vocabulary); the batch is used up.

        Raises DocumentError for a continuation without tokens.
        """
        if len(continuations) != batch.rows or any(len(each) == 0 for each in continuations):
            raise DocumentError("one continuation of at least one token is needed for each prompt")
        fed = max(len(each) for each in continuations) - 1
        logits = batch.logits[:, None]
        if fed:
            rows = [[*each[:-1], *[each[0]] * (fed + 1 - len(each))] for each in continuations]
            self.check_room(batch.cache.next_position, fed)
            batch.lengthen(fed)
            ids = torch.tensor(rows, device=self.model.device)
            logits = torch.cat([logits, self._step(ids, batch.cache, batch.padding, batch.seen, keep=fed)], dim=1)
        return [row[: len(each)] for row, each in zip(logits, continuations, strict=True)]

    @torch.no_grad()
    def next_token_logits(self, cache: CompactedCache, token_ids: Sequence[int]) -> Tensor:
        """Append token ids to a cache of one sequence; return the logits behind each token, (n, vocabulary) float32."""
        start = cache.next_position
        self.check_room(start, len(token_ids))
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        positions = torch.arange(start, start + len(token_ids), device=self.model.device)[None]
        try:
            output = self.model.causal_lm(input_ids=ids, cache=cache, position_ids=positions, use_cache=True)
        except BaseException:
            cache.roll_back(start)
            raise
        if len(cache.token_ids) == start:
            cache.token_ids.extend(int(i) for i in token_ids)
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.no_grad()
    def _run(
        self,
        token_ids: Sequence[int],
        cache: CompactedCache,
        capture: CapturedQueries | None,
        progress: Progress | None,
        phase: str,
        numbered_from: int | None = None,
        still: int | None = None,
    ) -> None:
        """Run tokens through the model in chunks, without logits that nobody reads.

        Captured queries are filed under their positions, or numbered from `numbered_from` on; `still` is how many are
        to come, this call's tokens by default.
        """
        total = len(token_ids)
        number = cache.next_position if numbered_from is None else numbered_from
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        for begin in range(0, total, self.settings.prefill_chunk):
            chunk = ids[:, begin : begin + self.settings.prefill_chunk]
            position = cache.next_position
            positions = torch.arange(position, position + chunk.shape[1], device=chunk.device)[None]
            inputs: dict[str, Any] = {"input_ids": chunk, "cache": cache, "position_ids": positions}
            if capture is None:
                self.model.causal_lm(**inputs, use_cache=True, logits_to_keep=1)
            else:
                capture.plan(number + begin, chunk.shape[1], (total if still is None else still) - begin)
                with cache.observed(capture.take):
                    self.model.causal_lm(**inputs, use_cache=True, logits_to_keep=1)
            cache.drop_outside_windows()
            if progress is not None:
                progress(phase, min(begin + chunk.shape[1], total), total)

    @torch.no_grad()
    def _step(self, ids: Tensor, cache: CompactedCache, padding: Tensor, seen: Tensor | None, keep: int = 1) -> Tensor:
        """One forward of a batch whose rows are padded on the left; logits (batch, keep, vocabulary) of its end.

        After an error the cache is as it was.
        """
        position = cache.next_position
        positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None] - padding[:, None]
        try:
            output = self.model.causal_lm(
                input_ids=ids,
                cache=cache,
                position_ids=positions.clamp(min=0),
                attention_mask=seen,
                use_cache=True,
                logits_to_keep=keep,
            )
        except BaseException:
            cache.reserve(0)
            cache.roll_back(position)
            raise
        logits: Tensor = output.logits[:, -keep:].float()
        return logits

    @staticmethod
    def _accept(watch: StopWatch, index: int, token: int, on_token: Callable[[int, int], None] | None) -> bool:
        """Give a token to one answer; return whether the answer goes on."""
        going = watch.add(index, token)
        if on_token is not None and watch.shown(index):
            on_token(index, token)
        return going

    def _capture_store(self, cache: CompactedCache, start: int, total: int, seed: int | None) -> CapturedQueries | None:
        """Return where the queries go: on with what the cache has, a new store, or none."""
        if seed is None:
            return None
        held = cache.captured
        if held is not None and start and held.seed == seed:
            return held.clone() if held.shared or held.must_evict(total) else held
        return self._new_store(seed, start) if held is None else None

    def _new_store(self, seed: int, first: int = 0) -> CapturedQueries | None:
        """Return a store for queries from position `first` on that the settings' bound leaves room for, or None."""
        size = torch.finfo(self.model.dtype).bits // 8
        each = len(self.geometry.full_layers) * self.geometry.query_heads * self.geometry.head_dim * size
        store = CapturedQueries.within_bytes(self.settings.capture_bytes, each, seed)
        store.first = first
        return store if store.capacity else None

    def check_room(self, start: int, tokens: int, more: int = 0) -> None:
        limit = self.geometry.max_positions
        if tokens + more == 0:
            raise DocumentError("there is nothing to read: the text has no tokens")
        if start + tokens + more > limit:
            parts = f"{start + tokens:,} tokens" + (f" and an answer of up to {more:,}" if more else "")
            raise ContextLengthError(
                f"{parts} do not fit the model's context of {limit:,}: shorten the text"
                + (", ask for fewer new tokens," if more else "")
                + " or take a model with a longer context"
            )


def _shifted(progress: Progress, done: int, total: int) -> Progress:
    """Report the progress of a part as that of the whole."""
    return lambda phase, part, _: progress(phase, done + part, total)
