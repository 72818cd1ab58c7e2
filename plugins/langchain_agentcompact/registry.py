"""Weights that are loaded once in a process and shared by all chat models that name them."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcompact.api import as_engine
from agentcompact.engines import Engine, TransformersEngine
from agentcompact.engines.sampling import end_token_ids
from agentcompact.errors import CapabilityError, InputError
from agentcompact.models import LoadedModel, load_model, resolve_source
from agentcompact.models.embedded import EMBEDDED_FILE, EMBEDDED_SHA256
from agentcompact.models.gguf import converted_folder
from agentcompact.models.hub import cached_snapshot
from agentcompact.session.rendering import ConversationTemplate
from langchain_agentcompact.states import SnapshotFolder, StatePool
from langchain_agentcompact.tool_calls import ToolCallForm, read_form

if TYPE_CHECKING:
    from langchain_agentcompact.turns import TurnRunner

TEMPLATES_KEPT = 32


class SharedModel:
    """One model of this process: its engine, loaded on first use, the conversations it holds, and a lock.

    lock: held while the model works for one call; whoever calls meanwhile waits.
    """

    def __init__(self, name: str, revision: str | None, dtype: str, device: str) -> None:
        self.name = name
        self.revision = revision
        self.dtype = dtype
        self.device = device
        self.lock = threading.Lock()
        self._loading = threading.RLock()
        self._given: Engine | None = None
        self._templates: OrderedDict[str, ConversationTemplate] = OrderedDict()

    @classmethod
    def of(cls, name: str, model: LoadedModel | Engine) -> SharedModel:
        """Share a model that is loaded already."""
        made = cls(name, None, "auto", "auto")
        made._given = as_engine(model)
        return made

    @property
    def engine(self) -> Engine:
        """The engine; loads the weights the first time. Raises what `load_model` raises."""
        with self._loading:
            if self._given is None:
                loaded = load_model(self.name, dtype=self.dtype, device=self.device, revision=self.revision)
                self._given = as_engine(loaded)
            return self._given

    @property
    def is_loaded(self) -> bool:
        return self._given is not None

    @cached_property
    def pool(self) -> StatePool:
        """The conversations held; to be used under `lock`."""
        return StatePool(self.engine, SnapshotFolder())

    @cached_property
    def runner(self) -> TurnRunner:
        """What runs the model's turns; to be used under `lock`."""
        from langchain_agentcompact.turns import TurnRunner

        return TurnRunner(self)

    @cached_property
    def form(self) -> ToolCallForm:
        """How the model's template writes a tool call."""
        return read_form(self._render if self.engine.has_chat_template else None)

    @cached_property
    def grammar_tokenizer(self) -> Any:
        """The tokenizer in llguidance's form. Raises CapabilityError where it cannot be made."""
        engine = self.engine
        if not isinstance(engine, TransformersEngine):
            raise CapabilityError("this engine cannot constrain an answer: leave tool_choice and the schema out")
        from llguidance.hf import from_tokenizer

        model = engine.model
        size = model.causal_lm.get_output_embeddings().weight.shape[0]
        try:
            return from_tokenizer(model.tokenizer, n_vocab=size, eos_token=sorted(end_token_ids(model)))
        except ValueError as error:
            raise CapabilityError(f"the model's tokenizer cannot constrain an answer: {error}") from error

    def template(self, tools: Sequence[dict[str, Any]]) -> ConversationTemplate:
        """Return the conversation template for a set of tools; its probes are rendered once a set."""
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._templates:
            chat = self._render if self.engine.has_chat_template else None
            self._templates[key] = ConversationTemplate(chat, tools, self.engine.control_strings())
        self._templates.move_to_end(key)
        while len(self._templates) > TEMPLATES_KEPT:
            self._templates.popitem(last=False)
        return self._templates[key]

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, reply: bool) -> str:
        return self.engine.render_chat(messages, tools, generation_prompt=reply)

    def longest_context(self) -> int | None:
        """Return the positions of the model's context, read from its files if need be; None where they are not here.

        Loads no weights and uses no network.
        """
        if self._given is not None:
            return self._given.geometry.max_positions
        try:
            source = resolve_source(self.name, revision=self.revision)
        except InputError:
            return None  # said in full where the model is used
        folder: Path | None = source.path
        if source.kind == "embedded":
            folder = converted_folder(Path(EMBEDDED_FILE).stem, EMBEDDED_SHA256)
        elif source.kind == "hub":
            folder = cached_snapshot(source.name, self.revision)
        return None if folder is None else _positions_in(folder / "config.json")


def _positions_in(config: Path) -> int | None:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = values.get("max_position_embeddings") or values.get("text_config", {}).get("max_position_embeddings")
    return int(found) if isinstance(found, int) else None


_models: dict[tuple[str, str | None, str, str], SharedModel] = {}
_registered: dict[str, SharedModel] = {}
_guard = threading.Lock()


def shared_model(name: str, revision: str | None = None, dtype: str = "auto", device: str = "auto") -> SharedModel:
    """Return the process's one model of that name; nothing is loaded before it is used."""
    with _guard:
        if name in _registered:
            return _registered[name]
        key = (name, revision, dtype, device)
        return _models.setdefault(key, SharedModel(*key))


def register_model(name: str, model: LoadedModel | Engine) -> None:
    """Let chat models use a loaded model, or an engine, by a name of your own: `ChatAgentCompact(model=name)`."""
    shared = SharedModel.of(name, model)
    with _guard:
        _registered[name] = shared


def unload_model(name: str) -> None:
    """Forget a model and the conversations it holds; its memory is free once nobody uses it any more."""
    with _guard:
        _registered.pop(name, None)
        for key in [key for key in _models if key[0] == name]:
            del _models[key]
