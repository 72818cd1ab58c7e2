"""The settings of attention matching, shared by its presets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from agentcompact.fitting.attention_statistics import Score
from agentcompact.fitting.budgets import BudgetKind
from agentcompact.queries.mix import KINDS
from agentcompact.queries.self_study import ANSWER_TOKENS, PROMPTS
from agentcompact.strategies.base import StrategySettings


class AttentionMatchingSettings(StrategySettings):
    """The steps of attention matching, and what each needs; the defaults are what kept most answers when measured."""

    queries: str = Field(
        "repeat_prefill",
        description="reference queries, joined by +: context_prefill, the prefill's own (free); repeat_prefill, of "
        "repeating the context (slower, far better); self_study, of the model's questions and answers about it",
    )
    on_policy: bool = Field(
        False, description="take each layer's queries from a pass over the layers compacted already (not the prefill's)"
    )
    query_subset: Literal["all", "random", "mahalanobis", "extremes", "mean"] = Field(
        "all", description="use a few of the queries only"
    )
    subset_queries: int = Field(256, ge=1, description="queries of a subset, per KV head")
    study_prompts: int = Field(PROMPTS, ge=1, description="self_study: prompts that are answered")
    study_tokens: int = Field(ANSWER_TOKENS, ge=1, description="self_study: most tokens of an answer")
    budgets: BudgetKind = Field(
        "global",
        description="entries of each head: equally many; by one ranking over all layers and heads (global) or within "
        "each layer (adakv); fewer in deeper layers (pyramid); or in the proportions of a file",
    )
    floor: float = Field(
        0.2, ge=0, le=1, description="global, adakv: fraction of the budget that every head gets, whatever the ranking"
    )
    budgets_file: str | None = Field(
        None, description="JSON for budgets=file: a list per layer with a proportion for each KV head"
    )
    keys: Literal["highest_attention", "two_pass", "omp"] = Field(
        "highest_attention", description="score all keys by all queries, a shortlist only, or pursue the mass greedily"
    )
    score: Score = Field("max", description="how a key's weights over the queries are summed up")
    omp: Literal["published", "exact"] = Field("published", description="omp: the published schedule, or key by key")
    bias: Literal["nnls", "redistribute", "none"] = Field("nnls", description="how the entries get their biases")
    values: Literal["least_squares", "direct"] = Field("least_squares", description="fitted or original values")
    nnls: Literal["published", "converged"] = Field("published", description="mode of the NNLS fit")
    ridge: float = Field(1e-6, gt=0, allow_inf_nan=False, description="ridge, relative to the Gram matrix's row sums")
    first_pass_queries: int = Field(256, ge=1, description="two_pass: random queries that score all keys")
    shortlist: float = Field(
        5.0, ge=1, le=1e6, allow_inf_nan=False, description="two_pass: keys on the shortlist per entry kept"
    )
    count_rest: bool | None = Field(
        None,
        description="two_pass: add the mass off the shortlist, as the first pass saw it; default: if compacted before",
    )

    @property
    def query_kinds(self) -> list[str]:
        """The kinds of reference queries, in order."""
        return [kind.strip() for kind in self.queries.split("+")]

    @property
    def fits(self) -> bool:
        """Whether something is fitted to the attention of all keys."""
        return self.keys == "omp" or self.bias == "nnls" or self.values == "least_squares"

    @field_validator("queries")
    @classmethod
    def _kinds_exist(cls, value: str) -> str:
        for kind in value.split("+"):
            if kind.strip() not in KINDS:
                raise ValueError(f"there are no queries '{kind.strip()}'; there are: {', '.join(KINDS)}, joined by +")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> AttentionMatchingSettings:
        if self.on_policy and "context_prefill" in self.query_kinds:
            raise ValueError("on_policy needs queries that are read behind the cache: repeat_prefill or self_study")
        if self.budgets == "file" and self.budgets_file is None:
            raise ValueError("budgets=file needs a budgets_file")
        return self


class PresetSettings(AttentionMatchingSettings):
    """The defaults of the published presets: the prefill's own queries, and equally many entries a head."""

    queries: str = Field(
        "context_prefill",
        description=AttentionMatchingSettings.model_fields["queries"].description,
    )
    budgets: BudgetKind = Field("uniform", description=AttentionMatchingSettings.model_fields["budgets"].description)
    floor: float = Field(0.0, ge=0, le=1, description=AttentionMatchingSettings.model_fields["floor"].description)
    score: Score = Field("rms", description=AttentionMatchingSettings.model_fields["score"].description)
