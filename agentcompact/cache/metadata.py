"""What is known of a compacted cache beside its entries: how it was made, from what, by which model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class PromptFormat(BaseModel):
    """The text around a document and around each question about it.

    The cache holds `prefix` + document; a question is asked as `opening` + `before_question` + question +
    `after_question`, and its answer ends at any of `stop`, for a model that goes on with a question of its own.
    `opening` is what a chat template writes to begin a user's message, where questions are messages of their own.
    """

    model_config = ConfigDict(frozen=True)

    kind: str = "raw"
    prefix: str = ""
    opening: str = ""
    before_question: str = "\nQuestion: "
    after_question: str = "\nAnswer:"
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ("\n\n", "\nQuestion:")


class Report(BaseModel):
    """What one compaction did.

    Seconds per phase, entries (over all compacted layers and KV heads) and bytes of entries before and after,
    `tokens` the logical length of the span, `budget` the entries per layer and head asked for.
    """

    strategy: str
    settings: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    tokens: int = 0
    budget: int = 0
    entries_before: int = 0
    entries_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    compaction_tokens: int = 0
    """Tokens run through the model for the compaction itself (recomputed queries)."""
    seconds: dict[str, float] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    blocks: int = 1
    """Parts that the span was compacted in, one after another."""
    summary: str = ""
    """The text that a strategy wrote in place of the span, for one that does."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Of a strategy that trains: its schedule, losses by stage, seconds per update, and memory."""

    @property
    def ratio(self) -> float:
        """Entries before for each entry after."""
        return self.entries_before / max(1, self.entries_after)


class CacheMetadata(BaseModel):
    """Everything of a cache that is no tensor; written into the cache file."""

    model_source: str = ""
    model_type: str = ""
    model_fingerprint: str = ""
    model_dtype: str = ""
    tokenizer_hash: str = ""
    rope: dict[str, Any] = Field(default_factory=dict)
    scaling: float = 0.0
    document: str = ""
    document_sha256: str = ""
    prompt: PromptFormat = Field(default_factory=PromptFormat)
    reports: list[Report] = Field(default_factory=list)
    prefill_seconds: float | None = None
    created: str = ""
    library_version: str = ""
