"""Settings that are not a strategy's own: how a model is run and how its tokens are chosen."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentcompact.errors import BudgetError, SettingsError

MIB = 1024 * 1024

SettingsModel = TypeVar("SettingsModel", bound=BaseModel)


class EngineSettings(BaseModel):
    """How an engine runs its model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill_chunk: int = Field(1024, ge=1, description="tokens of one prefill pass")
    capture_bytes: int = Field(
        512 * MIB, ge=0, description="bytes that the queries captured in a prefill may take; 0 captures none"
    )
    batch_size: int = Field(16, ge=1, description="questions decoded together")


class SamplingSettings(BaseModel):
    """How the next token is chosen; a temperature of 0 is greedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_new_tokens: int = Field(128, ge=1, description="most tokens of one answer")
    temperature: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus: keep the likeliest tokens up to this mass")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the sampler")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="an answer ends before the first of these strings in it"
    )


def build_settings(model: type[SettingsModel], values: dict[str, Any], owner: str) -> SettingsModel:
    """Validate `values` as `model`, naming the nearest setting for one that does not exist.

    Raises SettingsError with one line that names `owner`, the setting and what it takes.
    """
    for name in values:
        if name not in model.model_fields:
            raise SettingsError(
                f"{owner} has no setting '{name}'{suggestion(name, model.model_fields)}; "
                f"it has: {', '.join(model.model_fields) or 'none'}"
            )
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        raise SettingsError(f"{owner}: {where}={first.get('input')!r}: {first['msg']}") from error


def read_value(text: str) -> Any:
    """Read a setting's value as people write it: JSON where it can be read as JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def suggestion(name: str, known: Any) -> str:
    """Return ", did you mean 'x'?" for the nearest of the known names, or nothing."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean '{close[0]}'?" if close else ""


def resolve_budget(tokens: int, *, ratio: float | None = None, budget: int | None = None) -> int:
    """Return the entries per layer and KV head that a ratio or a budget means for `tokens` tokens.

    A ratio r means ceil(tokens / r), so at least one entry. Raises BudgetError for none or both of the two,
    a ratio below 1 or not finite, or a budget below 1.
    """
    if (ratio is None) == (budget is None):
        raise BudgetError("give a ratio or a budget" if ratio is None else "give a ratio or a budget, not both")
    if budget is not None:
        if not isinstance(budget, int):
            raise BudgetError(f"budget {budget!r} is no whole number")
        if budget < 1:
            raise BudgetError(f"budget {budget} is too small: at least one entry per head is kept")
        return budget
    if not isinstance(ratio, (int, float)) or not math.isfinite(ratio) or ratio < 1:
        raise BudgetError(f"ratio {ratio} cannot be met: it must be a number of at least 1 (8 keeps one in eight)")
    return max(1, math.ceil(tokens / ratio))
