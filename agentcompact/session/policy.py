"""When a conversation is compacted, how much of it stays as it is, and by which strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from agentcompact.errors import SettingsError
from agentcompact.settings import suggestion

Kind = Literal["tokens", "fraction", "messages"]
Bound = tuple[Kind, float]
"""("tokens", n), ("fraction", of the window) or ("messages", n)."""

ENVIRONMENT_PREFIX = "AGENTCOMPACT_SESSION_"
HIGHEST_RATIO = 64.0
"""Beyond this a compaction keeps next to nothing."""
SMALLEST_REPLY = 16
"""Tokens that must be free for a reply."""


def read_bound(value: Any) -> Bound:
    """Read ("fraction", 0.8), "fraction:0.8", "80%", 0.8, "messages:40", "tokens:6000" or 6000.

    Raises ValueError for what is none of these.
    """
    if isinstance(value, str):
        text = value.strip()
        kind, colon, number = text.partition(":")
        if colon:
            return read_bound((kind.strip(), number.strip()))
        if text.endswith("%"):
            return read_bound(("fraction", float(text[:-1]) / 100))
        value = float(text)
    if isinstance(value, (int, float)):
        return read_bound(("fraction" if 0 < value < 1 else "tokens", value))
    kind, number = value
    size = float(number)
    if kind not in ("tokens", "fraction", "messages"):
        raise ValueError(f"'{kind}' is none of tokens, fraction, messages")
    if not math.isfinite(size) or size <= 0 or (kind == "fraction" and size > 1):
        raise ValueError(f"{kind}:{number} must be above 0" + (" and at most 1" if kind == "fraction" else ""))
    return (kind, size if kind == "fraction" else float(round(size)))


def _read_bounds(value: Any) -> tuple[Bound, ...]:
    """Read one bound or several; a pair like ("tokens", 6000) is one."""
    if isinstance(value, str):
        return tuple(read_bound(part) for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)):
        if len(value) == 2 and value[0] in ("tokens", "fraction", "messages"):
            return (read_bound(tuple(value)),)
        return tuple(read_bound(tuple(part) if isinstance(part, list) else part) for part in value)
    return (read_bound(value),)


Bounds = Annotated[tuple[Bound, ...], NoDecode, BeforeValidator(_read_bounds)]


class SessionPolicy(BaseModel):
    """How a session keeps within its window. All counts are held positions, which is what attention costs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    auto: bool = Field(True, description="compact by itself at the trigger")
    window: int | None = Field(None, ge=64, description="held positions at most; default: the model's context")
    trigger: Bounds = Field(
        (("fraction", 0.8),), description="when to compact: tokens:N, fraction:F of the window, messages:N live ones"
    )
    trigger_when: Literal["any", "all"] = Field("any", description="whether one trigger is enough or all must hold")
    keep: Bounds = Field(
        (("messages", 6),), description="how much of the end stays as it is; of several, what keeps most"
    )
    strategy: str = Field("attention_matching", description="see `agentcompact strategies`")
    settings: dict[str, Any] = Field(default_factory=dict, description="the strategy's settings")
    second_strategy: str | None = Field(
        None, description="what to try when the strategy fails, falls short of min_fidelity, or frees too little"
    )
    ratio: float = Field(4.0, ge=1, allow_inf_nan=False, description="logical tokens for each entry kept")
    max_ratio: float | None = Field(
        None, ge=1, allow_inf_nan=False, description="never compact further than this; default: 64, or a higher ratio"
    )
    target: float = Field(0.5, gt=0, le=1, description="fraction of the window that compacted entries may fill")
    margin: float = Field(
        0.1, gt=0, lt=1, description="fraction of the window that a compaction must free below the trigger"
    )
    min_span: int = Field(64, ge=2, description="tokens worth compacting at least")
    block: int = Field(1024, ge=16, description="tokens of a too long message that are read and compacted at a time")
    min_fidelity: float | None = Field(
        None, ge=0, le=1, description="top-1 agreement that a compaction must reach on the probes, or it is refused"
    )
    seed: int = Field(0, ge=0, description="of every random choice")
    snapshot_bytes: int = Field(2**31, ge=0, description="bytes of snapshots kept for undo and resume")

    @model_validator(mode="after")
    def _goes_together(self) -> SessionPolicy:
        if self.max_ratio is not None and self.max_ratio < self.ratio:
            raise ValueError(f"max_ratio {self.max_ratio:g} is below the ratio {self.ratio:g}")
        if not self.trigger or not self.keep:
            raise ValueError("trigger and keep need at least one bound each")
        for kind, size in self.trigger:
            if kind == "fraction" and size <= self.margin:
                raise ValueError(f"the trigger of {size:.0%} must be above the margin of {self.margin:.0%}")
        return self

    @property
    def highest_ratio(self) -> float:
        """The ratio that no compaction passes."""
        return max(HIGHEST_RATIO, self.ratio) if self.max_ratio is None else self.max_ratio

    def window_of(self, longest: int) -> int:
        """Return the window in held positions, for a model of at most `longest` positions."""
        return longest if self.window is None else min(self.window, longest)

    def trigger_tokens(self, window: int) -> int:
        """Return the held positions that trigger a compaction; the window itself where only messages do."""
        sizes = [size if kind == "tokens" else size * window for kind, size in self.trigger if kind != "messages"]
        if not sizes:
            return window
        return min(window, int(min(sizes) if self.trigger_when == "any" else max(sizes)))

    def is_triggered(self, held: float, live_messages: int, window: int) -> bool:
        """Whether a session that holds so much is to be compacted."""
        reached = []
        for kind, size in self.trigger:
            count = live_messages if kind == "messages" else held
            reached.append(count >= (size * window if kind == "fraction" else size))
        return any(reached) if self.trigger_when == "any" else all(reached)


def read_policy(file: Path | None = None, **values: Any) -> SessionPolicy:
    """Return a policy from values, else the environment (AGENTCOMPACT_SESSION_RATIO=8), else a TOML file's [session].

    Raises SettingsError with one line for a setting or a value that does not exist, or a file that cannot be read.
    """
    for name in values:
        if name not in SessionPolicy.model_fields:
            raise SettingsError(
                f"a session has no setting '{name}'{suggestion(name, SessionPolicy.model_fields)}; "
                f"it has: {', '.join(SessionPolicy.model_fields)}"
            )
    if file is not None and not file.is_file():
        raise SettingsError(f"there is no settings file {file}")

    class Sources(SessionPolicy, BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENVIRONMENT_PREFIX, toml_file=file, toml_table_header=("session",), extra="forbid", frozen=True
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    try:
        found = Sources(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"{where}={first.get('input')!r}: " if where else ""  # what goes wrong together names itself
        raise SettingsError(f"session: {what}{first['msg']}") from error
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the session's settings cannot be read from {file or 'the environment'}: {error}"
        ) from error
    return SessionPolicy(**found.model_dump())
