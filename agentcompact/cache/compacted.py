"""The cache: a compacted span per layer, the live tail behind it, and what is known about both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache

from agentcompact.cache.attention import register_attention
from agentcompact.cache.captured import CapturedQueries
from agentcompact.cache.layers import FullLayer, SlidingLayer
from agentcompact.cache.metadata import CacheMetadata
from agentcompact.cache.span import Span, join_spans
from agentcompact.errors import CacheError

if TYPE_CHECKING:
    from agentcompact.models import LoadedModel, ModelGeometry


class CompactedCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` whose layers of full attention hold a compacted span and a live tail.

    Without a span it is an ordinary cache. Layers with a sliding window keep their window.
    """

    def __init__(self, geometry: ModelGeometry, config: Any) -> None:
        register_attention()
        layers = [
            FullLayer(config) if window is None else SlidingLayer(config, window) for window in geometry.sliding_windows
        ]
        super().__init__(layers=layers)
        self.geometry = geometry
        self.config = config
        self.metadata = CacheMetadata()
        self.token_ids: list[int] = []
        """Ids of all logical tokens in order; kept while the cache holds one sequence."""
        self.captured: CapturedQueries | None = None

    def __repr__(self) -> str:
        return (
            f"CompactedCache(next_position={self.next_position}, entries={self.entries}, "
            f"tail={self.tail_length}, bytes={self.nbytes})"
        )

    # What it holds

    @property
    def next_position(self) -> int:
        """RoPE position of the next token: the logical length, whatever was compacted."""
        return int(self.get_seq_length())

    @property
    def full_layers(self) -> list[tuple[int, FullLayer]]:
        """The layers that can be compacted, with their indices."""
        return [(i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, FullLayer)]

    @property
    def span_tokens(self) -> int:
        """Logical tokens that the compacted span stands for."""
        return self.full_layers[0][1].before if self.full_layers else 0

    @property
    def tail_length(self) -> int:
        """Tokens of the live tail."""
        return self.next_position - self.span_tokens

    @property
    def is_compacted(self) -> bool:
        """Whether some layer holds a compacted span."""
        return any(layer.span is not None for _, layer in self.full_layers)

    @property
    def entries(self) -> int:
        """Entries of all compactable layers and KV heads: span and live tail."""
        heads = self.geometry.kv_heads
        return sum((layer.span.entries if layer.span else 0) + heads * layer.length for _, layer in self.full_layers)

    @property
    def held_positions(self) -> float:
        """Average entries per compactable layer and KV head, the live tail included: what attention costs."""
        return self.entries / max(1, len(self.full_layers) * self.geometry.kv_heads)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries really take, spare room of the tail's buffers included."""
        return sum(layer.nbytes for layer in self.layers)

    # Changing it

    def reserve(self, tokens: int) -> None:
        """Announce that the live tail will reach `tokens` positions, so that it is allocated once."""
        for _, layer in self.full_layers:
            layer.reserve = tokens

    def fork(self, batch_size: int | None = None) -> CompactedCache:
        """Return a cache that shares all entries and goes its own way from here.

        With a batch size, the fork holds that many sequences over one shared span: the live tail becomes part of
        the span (unbiased, and copied only if there is a compacted span before it).
        """
        other = CompactedCache.__new__(CompactedCache)
        Cache.__init__(other, layers=[layer.fork() for layer in self.layers])
        other.geometry, other.config = self.geometry, self.config
        other.metadata = self.metadata.model_copy(deep=True)
        other.token_ids = list(self.token_ids)
        other.captured = self.captured
        if self.captured is not None:
            self.captured.shared = True
        if batch_size is not None:
            other.captured = None
            for _, layer in other.full_layers:
                layer.hold(layer.all_entries(), layer.get_seq_length())
        return other

    def __copy__(self) -> CompactedCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactedCache:
        return self.fork()

    def truncate(self, next_position: int) -> None:
        """Forget the live tail's tokens from `next_position` on.

        Raises CacheError where that lies inside the compacted span, or before what sliding layers still hold.
        """
        if not self.span_tokens <= next_position <= self.next_position:
            raise CacheError(
                f"cannot truncate to {next_position}: the live tail covers positions {self.span_tokens} to "
                f"{self.next_position}"
            )
        self.crop(next_position - self.next_position)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, given as a negative number; all layers or none."""
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        self.roll_back(self.next_position + tokens_to_remove)

    def roll_back(self, next_position: int) -> None:
        """Cut each layer's tail back to a position it has been at, also after a pass that only some layers saw."""
        for layer in self.layers:
            layer.crop(min(0, next_position - layer.get_seq_length()))
        if self.captured is not None:
            self.captured = self.captured.before(next_position)
        del self.token_ids[next_position:]

    def set_gaps(self, start: int, gaps: Tensor) -> None:
        """Announce padding inside the rows of a batch: `gaps` (batch,) slots from slot `start` on."""
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.set_gaps(start, gaps)

    def drop_outside_windows(self) -> None:
        """Free the entries of sliding layers that no later token can see; no truncation goes back behind this."""
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.drop_outside_window()

    def windows(self) -> list[SlidingLayer]:
        """Return the sliding layers as they are now, for `restore_windows`."""
        return [layer.fork() for layer in self.layers if isinstance(layer, SlidingLayer)]

    def restore_windows(self, windows: Sequence[SlidingLayer]) -> None:
        """Put the sliding layers back to what `windows` returned, whatever was dropped since."""
        places = [index for index, layer in enumerate(self.layers) if isinstance(layer, SlidingLayer)]
        for index, window in zip(places, windows, strict=True):
            self.layers[index] = window

    def source(self, layer_index: int, start: int, stop: int) -> Span:
        """Return the entries of one layer, compacted and live, that lie at positions [start, stop)."""
        layer = self.layers[layer_index]
        span: Span | None = layer.entries_between(start, stop)
        if span is None:
            raise CacheError(f"layer {layer_index} holds nothing at positions {start} to {stop}")
        return span

    def replaced(self, spans: Sequence[Span], start: int, stop: int) -> CompactedCache:
        """Return a cache in which `spans`, one for each full layer, stand for the tokens [start, stop).

        Entries before `start` stay in the span as they are, and so do those behind `stop` that are compacted already;
        live tokens from `stop` on stay the live tail. Nothing of this cache changes, and the captured queries go along.
        """
        if not 0 <= start < stop <= self.next_position:
            raise CacheError(f"positions {start} to {stop} are no span of the cache's {self.next_position} tokens")
        other, border = self.fork(), max(stop, self.span_tokens)
        for (index, layer), span in zip(other.full_layers, spans, strict=True):
            kept = layer.get_seq_length() - border
            tail = layer.tail.last(layer.length, kept) if layer.tail is not None and kept else None
            head = [self.source(index, 0, start)] if start else []
            behind = layer.span.within(stop, border) if layer.span is not None and stop < border else None
            layer.hold(join_spans([*head, span, *([behind] if behind is not None else [])]), border, tail, kept)
        return other

    @contextmanager
    def observed(self, observer: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Call `observer(layer index, query (batch, query_heads, q, head_dim))` for each full layer of a forward."""
        try:
            for index, layer in self.full_layers:
                layer.observer = partial(observer, index)
            yield
        finally:
            for _, layer in self.full_layers:
                layer.observer = None

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the cache into one file; see `agentcompact.cache.file.save_cache`."""
        from agentcompact.cache.file import save_cache

        return save_cache(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path, model: LoadedModel) -> CompactedCache:
        """Read a cache file for `model`; see `agentcompact.cache.file.load_cache`."""
        from agentcompact.cache.file import load_cache

        return load_cache(path, model)
