"""Where a model's weights come from, what its attention looks like, and how its chat template is laid out.

The names below are imported on first use, so that importing this package does not import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcompact.models.cache_dir import cache_root
    from agentcompact.models.chat_template import PromptParts, render_chat, split_template
    from agentcompact.models.embedded import embedded_gguf
    from agentcompact.models.fingerprint import model_fingerprint, tokenizer_hash
    from agentcompact.models.geometry import ModelGeometry, read_geometry
    from agentcompact.models.gguf import convert_gguf
    from agentcompact.models.loading import LoadedModel, load_model, wrap_model
    from agentcompact.models.sources import ModelSource, resolve_source
    from agentcompact.models.support import check_attention, check_supported

__all__ = [
    "LoadedModel",
    "ModelGeometry",
    "ModelSource",
    "PromptParts",
    "cache_root",
    "check_attention",
    "check_supported",
    "convert_gguf",
    "embedded_gguf",
    "load_model",
    "model_fingerprint",
    "read_geometry",
    "render_chat",
    "resolve_source",
    "split_template",
    "tokenizer_hash",
    "wrap_model",
]

_HOME = {
    "LoadedModel": "loading",
    "ModelGeometry": "geometry",
    "ModelSource": "sources",
    "PromptParts": "chat_template",
    "cache_root": "cache_dir",
    "check_attention": "support",
    "check_supported": "support",
    "convert_gguf": "gguf",
    "embedded_gguf": "embedded",
    "load_model": "loading",
    "model_fingerprint": "fingerprint",
    "read_geometry": "geometry",
    "resolve_source": "sources",
    "render_chat": "chat_template",
    "split_template": "chat_template",
    "tokenizer_hash": "fingerprint",
    "wrap_model": "loading",
}


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` the first time `name` is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
