"""What one cell of an evaluation gave: a document compacted by a strategy at a ratio, and how well it did."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FULL = "full"
"""The cell of the full cache, uncompacted."""
NO_CONTEXT = "no_context"
"""The cell of the questions alone, without the document."""


CellKey = tuple[str, str, str, str, str, "float | None", int, int]


class QuestionResult(BaseModel):
    """How one question was answered.

    question, expected: what was asked, and the answers that count. score: 1 or 0 for `match` "any", the share of
    the answers found for "all", None without answers. choice: the option with the highest mean log-probability;
    choice_score: 1 or 0; None without options.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    kind: str = ""
    question: str = ""
    expected: list[str] = Field(default_factory=list)
    answer: str = ""
    score: float | None = None
    choice: int | None = None
    choice_score: float | None = None


class CellResult(BaseModel):
    """One document, one strategy, one ratio; one line of `results.jsonl`. What was not measured is None.

    strategy: a label, its settings included where they are not the defaults; `full` and `no_context` are the cells
    that utility is normalised by. ratio: as asked for, None for those two. tokens: the document's, beginning of
    sequence included. compactions: how often it was compacted, with new text arriving before each but the first.
    kl: mean KL divergence in nats from the full cache over its own greedy continuations. top1: the share of those
    tokens that stay the likeliest. output_error: relative error of attention outputs on the questions' queries;
    mass_error, log_mass_error: mean relative and mean absolute logarithmic error of the attention mass. overlap:
    the share of the kept entries that full-attention selection keeps too; None where keys are no originals.
    training: what the report of a strategy that trains says of it, its losses among it.
    entries_per_head: per compacted layer and KV head. held_positions: average entries per layer and head.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    model: str
    fingerprint: str
    dtype: str
    task: str
    document: str
    digest: str
    tokens: int
    length: int | None = None
    strategy: str
    settings: dict[str, Any] = Field(default_factory=dict)
    ratio: float | None = Field(None, ge=1)
    compactions: int = Field(1, ge=1)
    seed: int = 0
    metrics: list[str] = Field(default_factory=list)
    status: Literal["ok", "failed"] = "ok"
    error: str | None = None
    warnings: list[str] = Field(default_factory=list)
    questions: list[QuestionResult] = Field(default_factory=list)
    kl: float | None = None
    top1: float | None = None
    output_error: float | None = None
    mass_error: float | None = None
    log_mass_error: float | None = None
    overlap: float | None = None
    entries_per_head: list[list[int]] | None = None
    held_positions: float | None = None
    bytes: int | None = None
    prefill_seconds: float | None = None
    compaction_seconds: float | None = None
    compaction_tokens: int | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    decode_tokens_per_second: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def key(self) -> CellKey:
        """What makes two results those of the same cell."""
        return cell_key(
            self.fingerprint, self.dtype, self.digest, self.strategy, self.settings,
            self.ratio, self.compactions, self.seed,
        )  # fmt: skip

    def supersedes(self, earlier: CellResult) -> bool:
        """Whether this result counts instead of an earlier one of the same cell: not if it alone failed."""
        return self.status == "ok" or earlier.status == "failed"


def cell_key(
    fingerprint: str,
    dtype: str,
    digest: str,
    strategy: str,
    settings: dict[str, Any],
    ratio: float | None,
    compactions: int,
    seed: int,
) -> CellKey:
    """Say which cell it is; all settings count, also those with their defaults, which another version may change."""
    written = json.dumps(settings, sort_keys=True)
    return (fingerprint, dtype, digest, strategy, written, ratio, compactions, seed)


def latest(cells: Iterable[CellResult]) -> dict[CellKey, CellResult]:
    """Return the result of each cell that counts: the last one, but a failure never instead of a success."""
    chosen: dict[CellKey, CellResult] = {}
    for cell in cells:
        if cell.key not in chosen or cell.supersedes(chosen[cell.key]):
            chosen[cell.key] = cell
    return chosen
