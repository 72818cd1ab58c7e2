"""agentcompact: compacts the KV cache of a long document or conversation in latent space.

    >>> from agentcompact import answer, compact, load_model
    >>> model = load_model("smollm2")
    >>> cache = compact(model, open("book.txt").read(), ratio=8)
    >>> print(answer(model, cache, "Who ordered the audit?")[0].text)

The names below are imported on first use, so that `import agentcompact` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcompact.api import answer, compact, compact_many, prefill_document, recompact
    from agentcompact.cache import CacheMetadata, CompactedCache, PromptFormat, Report, Span
    from agentcompact.engines import Engine, Generation, TransformersEngine
    from agentcompact.generation import generation_inputs
    from agentcompact.models import LoadedModel, load_model, wrap_model
    from agentcompact.session import Session, SessionPolicy
    from agentcompact.settings import EngineSettings, SamplingSettings
    from agentcompact.strategies import (
        CompactionRequest,
        CompactionResult,
        Strategy,
        StrategySettings,
        make_strategy,
        register_strategy,
        strategy_names,
    )

_HOME = {
    "api": ("answer", "compact", "compact_many", "prefill_document", "recompact"),
    "cache": ("CacheMetadata", "CompactedCache", "PromptFormat", "Report", "Span"),
    "engines": ("Engine", "Generation", "TransformersEngine"),
    "generation": ("generation_inputs",),
    "models": ("LoadedModel", "load_model", "wrap_model"),
    "session": ("Session", "SessionPolicy"),
    "settings": ("EngineSettings", "SamplingSettings"),
    "strategies": (
        "CompactionRequest",
        "CompactionResult",
        "Strategy",
        "StrategySettings",
        "make_strategy",
        "register_strategy",
        "strategy_names",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CacheMetadata",
    "CompactedCache",
    "CompactionRequest",
    "CompactionResult",
    "Engine",
    "EngineSettings",
    "Generation",
    "LoadedModel",
    "PromptFormat",
    "Report",
    "SamplingSettings",
    "Session",
    "SessionPolicy",
    "Span",
    "Strategy",
    "StrategySettings",
    "TransformersEngine",
    "answer",
    "compact",
    "compact_many",
    "generation_inputs",
    "load_model",
    "make_strategy",
    "prefill_document",
    "recompact",
    "register_strategy",
    "strategy_names",
    "wrap_model",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'agentcompact' has no attribute '{name}'")
    value = getattr(import_module(f"agentcompact.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
