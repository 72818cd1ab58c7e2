"""The registry: strategies enter it through the entry-point group `agentcompact.strategies` or by a call."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, TypeVar

from agentcompact.errors import SettingsError
from agentcompact.settings import suggestion
from agentcompact.strategies.base import Strategy

ENTRY_POINT_GROUP = "agentcompact.strategies"

StrategyType = TypeVar("StrategyType", bound=type[Strategy])

_registered: dict[str, type[Strategy]] = {}


def register_strategy(strategy: StrategyType) -> StrategyType:
    """Add a strategy class to this process under its `name`; usable as a class decorator.

    Raises SettingsError where another class has that name.
    """
    known = _registered.get(strategy.name)
    if known is not None and known is not strategy:
        raise SettingsError(f"strategy '{strategy.name}' is registered already, by {known.__module__}")
    for point in entry_points(group=ENTRY_POINT_GROUP, name=strategy.name):
        if point.value != f"{strategy.__module__}:{strategy.__qualname__}":
            raise SettingsError(f"strategy '{strategy.name}' is registered already, by {point.value}")
    _registered[strategy.name] = strategy
    return strategy


def strategy_names() -> list[str]:
    """Return the names of all strategies, those of installed packages included."""
    return sorted({*_registered, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def strategy_class(name: str) -> type[Strategy]:
    """Return a strategy's class. Raises SettingsError, naming the nearest, for one that does not exist."""
    if name in _registered:
        return _registered[name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            loaded = point.load()
        except ImportError as error:
            raise SettingsError(f"strategy '{name}' cannot be loaded from {point.value}: {error}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
            raise SettingsError(f"strategy '{name}': {point.value} is no subclass of agentcompact.Strategy")
        return loaded
    names = strategy_names()
    raise SettingsError(
        f"there is no strategy '{name}'{suggestion(name, names)}; there are: {', '.join(names) or 'none installed'}"
    )


def make_strategy(strategy: str | Strategy, /, **settings: Any) -> Strategy:
    """Return a strategy by name with settings, or the one that was handed in."""
    if isinstance(strategy, Strategy):
        if settings:
            raise SettingsError(f"strategy '{strategy.name}' has its settings already: give its name to set others")
        return strategy
    return strategy_class(strategy)(**settings)
