"""What the full cache says: entries of each context, and what the model predicts behind it; kept on disk.

A context's entries are computed once and kept in bfloat16, and so is, for each cue, what the loss compares with: the
last hidden states that predict the continuation, and for the loss on attention outputs the queries of each layer of
full attention and what they read. All is rounded before it is used, so it is the same from disk and anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentcompact.cache import CompactedCache, Span
from agentcompact.cache.attention import read_entries, tail_branch
from agentcompact.cache.tail import TailBuffer
from agentcompact.engines import TransformersEngine
from agentcompact.files import atomic_output
from agentcompact.training.forward import hidden_states, logits_of
from agentcompact.training.objective import divergence
from agentcompact.training.windows import Cue, Window

Tensors = dict[str, Tensor]


@dataclass
class TeacherStore:
    """Tensors on disk under names, up to `limit` bytes; what does not fit is computed again when it is needed."""

    folder: Path
    limit: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.used = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def get(self, name: str, make: Callable[[], Tensors]) -> Tensors:
        """Return the tensors called `name`, made and kept if they are not there yet."""
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            try:
                kept: Tensors = load_file(path)
                return kept
            except SafetensorError:
                self.used -= path.stat().st_size
                path.unlink()
        tensors = {name: tensor.contiguous() for name, tensor in make().items()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.used + size <= self.limit:
            with atomic_output(path, overwrite=True) as temporary:
                save_file(tensors, temporary)
            self.used += path.stat().st_size
        return tensors


class Teacher:
    """The frozen model with its full cache."""

    def __init__(self, engine: TransformersEngine, store: TeacherStore, *, attention: bool) -> None:
        """attention: whether cues also hold what the loss on attention outputs needs."""
        self.engine = engine
        self.store = store
        self.attention = attention
        self._last: tuple[str, CompactedCache] = ("", engine.new_cache())

    def context(self, window: Window) -> CompactedCache:
        """Return the cache of a window's context, its entries rounded to bfloat16."""
        name = self._name(window.context_ids)
        if self._last[0] != name:
            entries = self.store.get(f"context-{name}", lambda: self._entries(window))
            self._last = (name, self._cache(entries, len(window.context_ids)))
        return self._last[1]

    def cue(self, window: Window, cue: Cue) -> Tensors:
        """Return what the full cache says behind a cue.

        hidden: (continuation, hidden size) float32. nothing: the divergence of the model without the context, nats a
        token. And for the attention loss, for each full layer i: queries.i, outputs.i, tail.i (query_heads, tokens,
        head_dim) and mass.i (query_heads, tokens, 1): what is read from context and tail, and from the tail alone.
        """
        kind = "attention" if self.attention else "cue"
        name = f"{kind}-{self._name(window.context_ids)}-{self._name(cue.ids)}-{cue.continuation}"
        return self.store.get(name, lambda: self._said(window, cue))

    def _name(self, ids: list[int]) -> str:
        content = f"{self.engine.model.fingerprint}|{self.engine.model.dtype}|{ids}"
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    @torch.no_grad()
    def _entries(self, window: Window) -> Tensors:
        cache = self.engine.prefill(window.context_ids)
        tensors: Tensors = {}
        for index, layer in enumerate(cache.layers):
            tail = layer.tail
            tensors[f"keys.{index}"] = tail.keys[0, :, : layer.length].to("cpu", torch.bfloat16)
            tensors[f"values.{index}"] = tail.values[0, :, : layer.length].to("cpu", torch.bfloat16)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def _cache(self, entries: Tensors, tokens: int) -> CompactedCache:
        """Put a context's entries into a cache: full layers hold them as a span, sliding ones as their window."""
        model, cache = self.engine.model, self.engine.new_cache()
        for index, layer in enumerate(cache.layers):
            keys, values = (entries[f"{part}.{index}"].to(model.device, model.dtype) for part in ("keys", "values"))
            held = keys.shape[1]
            if layer.is_sliding:
                layer.tail, layer.length, layer.before = TailBuffer(keys[None], values[None], held), held, tokens - held
                layer.tail.shared = layer.is_initialized = True
            else:
                layer.hold(Span.from_dense(keys, values, torch.arange(held, device=keys.device)), tokens)
        return cache

    @torch.no_grad()
    def _said(self, window: Window, cue: Cue) -> Tensors:
        model = self.engine.model
        seen: dict[int, Tensor] = {}
        cache: CompactedCache = self.context(window).fork()

        def note(index: int, query: Tensor) -> None:
            seen[index] = query

        with cache.observed(note):
            hidden = hidden_states(model, cache, cue.ids[:-1])[-cue.continuation :]
        without = hidden_states(model, self.engine.new_cache(), cue.ids[:-1])[-cue.continuation :]
        said = {"hidden": hidden.float().cpu()}
        logits = logits_of(model, said["hidden"].to(model.device, model.dtype))
        said["nothing"] = divergence(logits, logits_of(model, without)).cpu()
        for index, layer in cache.full_layers if self.attention else []:
            for name, tensor in self._read(cache, index, layer.before, seen[index]).items():
                said[f"{name}.{index}"] = tensor[0].cpu()
        return said

    def _read(self, cache: CompactedCache, index: int, tokens: int, query: Tensor) -> Tensors:
        """Return what a layer's queries (1, query_heads, q, head_dim) read from context and tail, as `cue` names it."""
        scaling, kept = self.engine.geometry.scaling, torch.bfloat16
        span, tail = (cache.source(index, *ends) for ends in ((0, tokens), (tokens, cache.next_position)))
        of_tail, tail_mass = tail_branch(
            query, tail.dense(tail.keys)[None], tail.dense(tail.values)[None], None, scaling
        )
        folded = query.reshape(1, span.heads, -1, query.shape[-1])
        output, mass = read_entries(folded, span.dense(span.keys)[None], span.dense(span.values)[None], None, scaling)
        output, mass = (part.reshape(*query.shape[:3], -1) for part in (output, mass))
        share = (mass - torch.logaddexp(mass, tail_mass)).exp()
        outputs = output * share + of_tail * (1 - share)
        return {
            "queries": query.to(kept),
            "outputs": outputs.to(kept),
            "tail": of_tail.to(kept),
            "mass": tail_mass.float(),
        }
