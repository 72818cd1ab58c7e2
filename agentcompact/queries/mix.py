"""Reference queries of several kinds, joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentcompact.cache import CapturedQueries, CompactedCache
from agentcompact.engines import Engine, Progress
from agentcompact.errors import CacheError, SettingsError
from agentcompact.fitting.selection import random_rows
from agentcompact.queries.context_prefill import context_prefill_queries
from agentcompact.queries.repeat_prefill import repeat_prefill_queries, repeat_turns
from agentcompact.queries.self_study import DEFAULT_STUDY, Study, self_study_queries, self_study_turns
from agentcompact.settings import suggestion

KINDS = ("context_prefill", "repeat_prefill", "self_study")

_Read = Callable[[int], Tensor]


class ReferenceQueries:
    """Queries of one or several kinds, read layer by layer.

    parts: for each kind, a function from a layer's index to its queries (query_heads, positions, head_dim), and the
    rows of them that are used: (positions used,), or None for all.
    """

    def __init__(self, parts: Sequence[tuple[_Read, Tensor | None]]) -> None:
        self._parts = list(parts)

    def layer(self, index: int) -> Tensor:
        """Return the queries of one layer, one kind behind the other: (query_heads, positions, head_dim)."""
        found = []
        for read, rows in self._parts:
            queries = read(index)
            found.append(queries if rows is None else queries[:, rows.to(queries.device)])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def reference_queries(
    kinds: Sequence[str],
    engine: Engine,
    cache: CompactedCache,
    start: int,
    stop: int,
    seed: int,
    progress: Progress | None = None,
    study: Study = DEFAULT_STUDY,
) -> ReferenceQueries:
    """Gather queries of these kinds (see `KINDS`) for the span [start, stop), and join them.

    Of context-prefill only the queries of the span's positions are used, of the others all. Where together they
    would take more than the engine's `capture_bytes`, each kind gives a share of its positions, seeded and alike in
    all layers. study: what self-study asks. Raises SettingsError for no kind, or one
    that does not exist.
    """
    _check_kinds(kinds)
    parts: list[_Read] = []
    for kind in dict.fromkeys(kinds):
        if kind == "context_prefill":
            parts.append(_inside(context_prefill_queries(engine, cache, start, stop, seed, progress), start, stop))
        elif kind == "repeat_prefill":
            parts.append(repeat_prefill_queries(engine, cache, start, stop, seed, progress).layer)
        else:
            parts.append(self_study_queries(engine, cache, start, stop, seed, progress, study).layer)
    return ReferenceQueries(list(zip(parts, _shares(parts, engine, seed), strict=True)))


def reference_turns(
    kinds: Sequence[str],
    engine: Engine,
    cache: CompactedCache,
    start: int,
    stop: int,
    seed: int,
    progress: Progress | None = None,
    study: Study = DEFAULT_STUDY,
) -> list[list[int]]:
    """Return the token ids of what is read behind the cache for these kinds of queries; arguments as above.

    Raises SettingsError for context-prefill, whose queries come from the cache's own tokens.
    """
    _check_kinds(kinds)
    turns: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        if kind == "context_prefill":
            raise SettingsError("context_prefill reads nothing behind the cache: name repeat_prefill or self_study")
        if kind == "repeat_prefill":
            turns += repeat_turns(engine, cache, start, stop)
        else:
            turns += self_study_turns(engine, cache, seed, progress, study)
    return turns


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise SettingsError(
                f"there are no queries '{kind}'{suggestion(kind, KINDS)}; there are: {', '.join(KINDS)}"
            )
    if not kinds:
        raise SettingsError(f"name the reference queries, one or more of: {', '.join(KINDS)}")


def _inside(captured: CapturedQueries, start: int, stop: int) -> _Read:
    return lambda index: captured.layer(index, start, stop)


def _shares(parts: Sequence[_Read], engine: Engine, seed: int) -> list[Tensor | None]:
    """Return which rows of each part are used, so that all of them keep to the engine's bound."""
    if len(parts) == 1:
        return [None]
    layers = engine.geometry.full_layers
    samples = [read(layers[0]) for read in parts]
    counts = [sample.shape[1] for sample in samples]
    each = len(layers) * samples[0][:, :1].nbytes
    capacity = engine.settings.capture_bytes // max(1, each)
    if capacity < len(parts):
        raise CacheError("no queries can be joined: the engine's capture_bytes is too small")
    if sum(counts) <= capacity:
        return [None] * len(parts)
    generator = torch.Generator().manual_seed(seed % 2**63)
    shares = [max(1, count * capacity // sum(counts)) for count in counts]
    shares[shares.index(max(shares))] -= max(0, sum(shares) - capacity)
    return [random_rows(count, share, generator) for count, share in zip(counts, shares, strict=True)]
