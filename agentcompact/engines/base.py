"""What a strategy and a session may ask of an engine, whatever runs the model underneath."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from agentcompact.cache import CacheMetadata, CapturedQueries, CompactedCache, Span
from agentcompact.engines.prompt_batch import PromptBatch
from agentcompact.models import ModelGeometry, PromptParts
from agentcompact.settings import EngineSettings, SamplingSettings

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

CAPTURES_QUERIES = "captures_queries"
GIVES_GRADIENTS = "gives_gradients"
ROTATES_STATES = "rotates_states"
GIVES_OUTPUT_NORMS = "gives_output_norms"
CAPTURES_INPUT_NORMS = "captures_input_norms"


@dataclass
class EngineCounters:
    """Tokens that went through the model, by what for."""

    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    compaction_tokens: int = 0
    probe_tokens: int = 0
    """Tokens read to measure a compaction."""

    @contextmanager
    def as_compaction(self) -> Iterator[None]:
        """Count what is read and decoded meanwhile as compaction work, and as nothing else."""
        before = self._worked
        try:
            yield
        finally:
            self.compaction_tokens += self._take_back(before)

    @contextmanager
    def as_probe(self) -> Iterator[None]:
        """Count what is read and decoded meanwhile as measuring, and as nothing else."""
        before = self._worked
        try:
            yield
        finally:
            self.probe_tokens += self._take_back(before)

    @property
    def _worked(self) -> tuple[int, int]:
        return self.prefilled_tokens, self.decoded_tokens

    def _take_back(self, before: tuple[int, int]) -> int:
        """Set both counts back to what they were; return the tokens counted since."""
        taken = sum(self._worked) - sum(before)
        self.prefilled_tokens, self.decoded_tokens = before
        return taken


@dataclass
class Generation:
    """One decoded answer. finish_reason: "eos", "stop" (a stop string) or "length"."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"


class TokenConstraint(Protocol):
    """Says which tokens one answer may go on with: a grammar, say."""

    def allow(self, logits: Tensor) -> Tensor:
        """Return logits (1, vocabulary) with -inf for every token that may not come next."""

    def take(self, token: int) -> int:
        """Take note of the token that was chosen; return the one to go on with, which may be another."""


class Engine(Protocol):
    """Runs one model over caches: token ids in, tokens and captured tensors out."""

    geometry: ModelGeometry
    capabilities: frozenset[str]
    settings: EngineSettings
    counters: EngineCounters
    prefers_raw_prompts: bool
    """Whether the model answers better after a plain text than in its chat template."""

    def new_cache(self) -> CompactedCache:
        """Return an empty cache for this model, its metadata naming the model."""

    def describe(self) -> CacheMetadata:
        """Return metadata that names the model and its tokenizer, and nothing else."""

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, nothing added.

        Control tokens written in it ("<|im_end|>") are read as plain text, so that a document cannot end its own
        message; with `control_tokens` they are read as such, which is for templates only.
        """

    def beginning(self) -> list[int]:
        """Return the ids that the tokenizer puts before a plain text: the beginning of sequence, or nothing."""

    def prompt_parts(self) -> PromptParts | None:
        """Return what the chat template writes around a user's message, or None where there is no template."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Render a conversation by the chat template. Raises InputError where the template refuses it."""

    def control_strings(self) -> frozenset[str]:
        """Return the texts that are read as control tokens in a template."""

    def load_cache(self, path: Path) -> CompactedCache:
        """Read a cache file of this engine's model; see `agentcompact.cache.file.load_cache`."""

    def prefill(
        self,
        token_ids: Sequence[int],
        cache: CompactedCache | None = None,
        *,
        capture_seed: int | None = None,
        progress: Progress | None = None,
    ) -> CompactedCache:
        """Append token ids to a cache (a new one by default) and return it."""

    def check_room(self, start: int, tokens: int, more: int = 0) -> None:
        """Raise ContextLengthError where `tokens` behind `start`, and `more` after them, pass the model's limit."""

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
        """Run turns of token ids only for their queries, each for itself behind a cache, which stays as it is.

        Without a cache a turn is a sequence of its own. Queries are filed under numbers that go on from turn to turn,
        from `numbered_from` on; those before number `first` are not kept. The work counts as compaction work. Raises
        CacheError where the settings leave no room for queries.
        """

    def read_rewriting(
        self, turns: Sequence[Sequence[int]], after: CompactedCache, rewrite: Callable[[int, Tensor], Span]
    ) -> None:
        """Read turns behind a cache, which stays as it is, replacing each full layer's entries on the way.

        rewrite: called with a layer's index and all its queries (query_heads, tokens, head_dim) before they attend;
        what it returns is what they and all later layers go by. One pass; it counts as compaction work.
        """

    def rotate(self, states: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Apply the model's rotary embedding at positions to states (heads, n, head_dim), or take it back.

        positions: (n,) or (heads, n). Computed in float32, returned in the states' dtype. It is the embedding of the
        full layers. Raises UnsupportedModelError where it cannot be told how the model rotates.
        """

    def output_norms(self, layer: int, values: Tensor, heads: range | None = None) -> Tensor:
        """Return the norm of W_O v, by W_O's slice of each query head: (kv_heads, n, head_dim) -> (query_heads, n).

        heads: the KV heads whose values are given, all by default. Computed in float32.
        """

    def recording_input_norms(self) -> AbstractContextManager[None]:
        """Inside it, what `capture` returns also holds the norm of each query's hidden state.

        That is the state that enters the attention block, behind its input norm.
        """

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens left out."""

    def decode(
        self,
        cache: CompactedCache,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        on_token: Callable[[int, int], None] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> list[Generation]:
        """Append one prompt per sequence of the cache and decode an answer to each.

        constraint: for a single prompt only.
        """

    def read_prompts(self, cache: CompactedCache, prompts: Sequence[Sequence[int]], room: int = 0) -> PromptBatch:
        """Append one prompt to each sequence of the cache, with room for as many tokens after it."""

    def decode_batch(
        self,
        batch: PromptBatch,
        sampling: SamplingSettings,
        on_token: Callable[[int, int], None] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> list[Generation]:
        """Decode an answer to each prompt of a batch; the batch is used up. constraint: for a single prompt only."""

    def continuation_logits(self, batch: PromptBatch, continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return what predicts each token of one continuation a row, (tokens, vocabulary); the batch is used up."""

    def next_token_logits(self, cache: CompactedCache, token_ids: Sequence[int]) -> Tensor:
        """Append token ids to a cache of one sequence and return the logits (n, vocabulary) behind each."""

    def forced_logits(
        self,
        cache: CompactedCache,
        turns: Sequence[tuple[Sequence[int], Sequence[int]]],
        observer: Callable[[int, Tensor], None] | None = None,
    ) -> list[Tensor]:
        """Read (prompt, continuation) pairs behind a cache, which stays as it is, in one batch.

        Returns what predicts each continuation, (tokens, vocabulary) each. Where the cache's spans require gradients
        and gradients are enabled (`GIVES_GRADIENTS`), they flow to the spans' keys, values and biases, and to no weight
        of the model. observer: called with each full layer's index and queries (rows, query_heads, tokens, head_dim);
        rows are padded on the left.
        """

    def gradient_bytes(self, rows: int, tokens: int, entries: float, predicted: int) -> int:
        """Estimate the bytes that `forced_logits` with gradients holds: rows of so many tokens over so many entries.

        predicted: positions whose logits are made.
        """
