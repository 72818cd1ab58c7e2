"""Strategies with settings, written in one word: `high_attn:queries=repeat_prefill:budgets=global`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcompact.errors import SettingsError
from agentcompact.evaluation.results import FULL, NO_CONTEXT
from agentcompact.settings import read_value
from agentcompact.strategies import Strategy, make_strategy, strategy_class, strategy_names

ALL = "all"


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy and the label it has in results: its name, and the settings that are not its defaults.

    settings: all of them, with a hash of what is in the files that they name.
    """

    label: str
    strategy: Strategy
    settings: dict[str, Any]


def choose_strategies(words: Sequence[str]) -> list[StrategyChoice]:
    """Return the strategies that words name, each once.

    "all" is every one but `none`, which is the full cache, and those that train, which may take hours: name them.

    Raises SettingsError for a strategy, a setting or a value that does not exist.
    """
    named = [each for word in words for each in (_all_names() if word == ALL else [word])]
    choices = {choice.label: choice for choice in map(_choose, named)}
    if not choices:
        raise SettingsError(f"no strategy is named; there are: {', '.join(strategy_names())}")
    return list(choices.values())


def label_of(strategy: Strategy) -> str:
    """Write a strategy as `choose_strategies` reads it."""
    changed = strategy.settings.model_dump(mode="json", exclude_defaults=True)
    written = [f"{name}={_written(value)}" for name, value in sorted(changed.items())]
    return ":".join([strategy.name, *written])


def _choose(word: str) -> StrategyChoice:
    name, *pairs = re.split(r":(?=\w+=)", word)
    if name in (FULL, NO_CONTEXT):
        raise SettingsError(f"'{name}' is always measured and need not be named")
    strategy = make_strategy(name, **dict(_pair(pair) for pair in pairs))
    settings = strategy.settings.model_dump(mode="json")
    for key, value in list(settings.items()):
        if key.endswith("_file") and isinstance(value, str) and Path(value).is_file():
            settings[f"{key}_sha256"] = hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return StrategyChoice(label_of(strategy), strategy, settings)


def _pair(pair: str) -> tuple[str, object]:
    name, _, value = pair.partition("=")
    return name, read_value(value)


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _all_names() -> list[str]:
    """All strategies that any model can be compacted with in reasonable time."""
    classes = {name: strategy_class(name) for name in strategy_names()}
    return [name for name, each in classes.items() if name != "none" and not each.trains and not each.learned]
