"""What a model's attention blocks do to values on their way out, and what comes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agentcompact.cache import CapturedQueries
from agentcompact.errors import UnsupportedModelError
from agentcompact.models import ModelGeometry

OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""What architectures call the projection W_O of an attention module."""


class OutputProjections:
    """Norms of W_O v for each query head, by the Gram matrices of W_O's slices, made once a layer.

    The modules are asked for products and never for their weights, so quantised ones work alike.
    """

    def __init__(self, modules: Sequence[Any], geometry: ModelGeometry, dtype: torch.dtype) -> None:
        self._modules = modules
        self._query_heads = geometry.query_heads
        self._kv_heads = geometry.kv_heads
        self._head_dim = geometry.head_dim
        self._dtype = dtype
        self._grams: dict[int, Tensor] = {}

    def norms(self, layer: int, values: Tensor, heads: range) -> Tensor:
        """Return the norms of W_O's slice of each query head times its values, in float32.

        values: (kv_heads, n, head_dim), of the KV heads in `heads` -> (kv_heads * G, n), the G query heads of each
        KV head one after another.
        """
        gram = self.gram(layer).to(values.device)
        group = self._query_heads // self._kv_heads
        grouped = gram.view(self._kv_heads, group, *gram.shape[1:])[heads.start : heads.stop]
        wide = values.float()
        squares = torch.stack([((wide @ grouped[:, g]) * wide).sum(dim=-1) for g in range(group)], dim=1)
        return squares.clamp(min=0).sqrt().flatten(0, 1)

    @torch.no_grad()
    def gram(self, layer: int) -> Tensor:
        """Return W_h^T W_h of each query head's slice W_h (hidden, head_dim) of W_O: (query_heads, d, d) float32."""
        if layer not in self._grams:
            project = _output_projection(self._modules[layer])
            device = next((p.device for p in self._modules[layer].parameters()), torch.device("cpu"))
            width = self._query_heads * self._head_dim
            rows = torch.zeros(self._head_dim + 1, width, dtype=self._dtype, device=device)
            grams = []
            for head in range(self._query_heads):
                rows.zero_()
                rows[torch.arange(self._head_dim), head * self._head_dim + torch.arange(self._head_dim)] = 1
                product = project(rows[None])[0].float()
                weight = product[:-1] - product[-1]
                grams.append(weight @ weight.T)
            self._grams[layer] = torch.stack(grams)
        return self._grams[layer]


class InputNorms:
    """Records the norm of what comes into the attention modules: while `recording`, into the store of a capture."""

    def __init__(self, modules: dict[int, Any]) -> None:
        self._modules = modules
        self._store: CapturedQueries | None = None
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the attention modules; all is as before afterwards."""
        handles = []
        try:
            for index, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(self._hook(index), with_kwargs=True))
            self._is_recording = True
            yield
        finally:
            self._is_recording = False
            for handle in handles:
                handle.remove()

    @contextmanager
    def into(self, store: CapturedQueries) -> Iterator[None]:
        """File the norms of all passes in it beside the queries of `store`, if they are recorded at all."""
        self._store = store if self._is_recording else None
        try:
            yield
        finally:
            self._store = None

    def _hook(self, index: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._store is not None:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                self._store.take_norms(index, torch.linalg.vector_norm(hidden[0].float(), dim=-1))

        return hook


def _output_projection(attention: Any) -> Callable[[Tensor], Tensor]:
    """Return the module that projects the heads' outputs. Raises UnsupportedModelError where none is known."""
    for name in OUTPUT_NAMES:
        module = getattr(attention, name, None)
        if isinstance(module, torch.nn.Module):
            return module
    raise UnsupportedModelError(
        f"{type(attention).__name__}: its output projection is none of {', '.join(OUTPUT_NAMES)}"
    )
