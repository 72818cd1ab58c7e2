"""Each eviction method against a slow reference written from its definition, entry by entry and query by query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokens

from agentcompact import CompactedCache, CompactionRequest, Span, TransformersEngine, make_strategy
from agentcompact.cache import CapturedQueries
from agentcompact.strategies import kvzip

TOKENS, LAYERS, KV_HEADS, GROUP, DIM, QUERIES = 10, 2, 2, 2, 16, 7
SCALING = DIM**-0.5
INFINITE = float("inf")


@dataclass
class Case:
    """A compacted cache with biases, and queries that were put beside it."""

    engine: TransformersEngine
    cache: CompactedCache
    repeated: CapturedQueries

    def entries(self, layer: int, head: int) -> list[tuple[torch.Tensor, torch.Tensor, float, int]]:
        parts = self.cache.source(layer, 0, TOKENS).head(head)
        return [(k.double(), v.double(), float(b), int(p)) for k, v, b, p in zip(*parts, strict=True)]

    def queries(self, layer: int, head: int, repeated: bool = False) -> torch.Tensor:
        """Those of the group's query heads, (GROUP, m, DIM)."""
        store = self.repeated if repeated else self.cache.captured
        return store.layer(layer)[GROUP * head : GROUP * head + GROUP].double()


def injected(count: int, generator: torch.Generator) -> CapturedQueries:
    store = CapturedQueries(100)
    store.plan(0, count, count)
    for layer in range(LAYERS):
        store.take(layer, 1.5 * torch.randn(1, KV_HEADS * GROUP, count, DIM, generator=generator))
        store.take_norms(layer, torch.rand(count, generator=generator) + 0.5)
    return store


@pytest.fixture(params=["uniform", "ragged"])
def case(request: Any, monkeypatch: pytest.MonkeyPatch) -> Case:
    g = torch.Generator().manual_seed(3)
    engine = TransformersEngine(tiny_model("llama"))
    live = engine.prefill(tiny_tokens(TOKENS))
    spans = []
    for layer in range(LAYERS):
        heads = []
        for head in range(KV_HEADS):
            dropped = {3, 6 + layer} if head and request.param == "ragged" else set()
            rows = [i for i in range(TOKENS) if i not in dropped]
            keys, values, _, positions = (part[rows] for part in live.source(layer, 0, TOKENS).head(head))
            heads.append((keys, values, torch.randn(len(rows), generator=g), positions))
        spans.append(Span.from_heads(heads))
    cache = live.replaced(spans, 0, TOKENS)
    cache.captured = injected(TOKENS, g)
    repeated = injected(QUERIES, g)
    monkeypatch.setattr(kvzip, "repeat_prefill_queries", lambda *_: repeated)
    return Case(engine, cache, repeated)


def softmax_over(query, entries, seen=lambda _: True):
    """The weight of each entry: exp(score + bias) over their sum, 0 for those not seen."""
    powers = [
        math.exp(SCALING * float(query @ key) + bias) if seen(position) else 0.0 for key, _, bias, position in entries
    ]
    total = sum(powers)
    return [power / total for power in powers]


def h2o(case, layer, head):
    entries, sums, counts = case.entries(layer, head), {}, {}
    for queries in case.queries(layer, head):
        for i, query in enumerate(queries):
            for j, weight in enumerate(softmax_over(query, entries, lambda position: position <= i)):
                if entries[j][3] <= i:
                    sums[j] = sums.get(j, 0.0) + weight
                    counts[j] = counts.get(j, 0) + 1
    scores = [sums[j] / counts[j] for j in range(len(entries))]
    return latest(scores, 2)  # half of the budget of 4


def latest(scores, count):
    """The last `count` entries above all others, the later the higher."""
    n = len(scores)
    return [1e6 + j if j >= n - count else score for j, score in enumerate(scores)]


def snapkv(case, layer, head):
    entries, window = case.entries(layer, head), 3
    first = TOKENS - window
    means = [0.0] * len(entries)
    for queries in case.queries(layer, head):
        for i in range(first, TOKENS):
            for j, weight in enumerate(softmax_over(queries[i], entries, lambda position: position <= i)):
                means[j] += weight / (window * GROUP)
    earlier = [j for j, entry in enumerate(entries) if entry[3] < first]
    pooled = []
    for j in earlier:
        near = [means[k] for k in earlier if abs(k - j) <= 2]
        pooled.append(sum(near) / len(near))
    return latest(pooled + means[len(earlier) :], len(entries) - len(earlier))


def turned(vector, position):
    """Llama's rotation: dimensions i and i + 8 by position * 10000^(-i / 8)."""
    out = vector.clone()
    for i in range(DIM // 2):
        angle = position * 10000.0 ** (-i / (DIM // 2))
        a, b = float(vector[i]), float(vector[i + DIM // 2])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def expected_attention(case, layer, head):
    entries, future, epsilon = case.entries(layer, head), 5, 0.02
    scores = [0.0] * len(entries)
    rotation = torch.zeros(DIM, DIM, dtype=torch.float64)
    for position in range(TOKENS, TOKENS + future):
        for i, unit in enumerate(torch.eye(DIM, dtype=torch.float64)):
            rotation[:, i] += turned(unit, position) / future
    for queries in case.queries(layer, head):
        plain = [turned(query, -position) for position, query in enumerate(queries)]
        mean = sum(plain) / len(plain)
        sigma = sum(torch.outer(x - mean, x - mean) for x in plain) / len(plain)
        mean, sigma = rotation @ mean, rotation @ sigma @ rotation.T
        powers = [
            math.exp(SCALING * float(mean @ k) + SCALING**2 / 2 * float(k @ sigma @ k) + bias)
            for k, _, bias, _ in entries
        ]
        for j, (_, value, _, _) in enumerate(entries):
            scores[j] += (powers[j] / sum(powers) + epsilon) * float(value.norm()) / GROUP
    return scores


def repeated_maximum(case, layer, head, plus=False):
    entries = case.entries(layer, head)
    scores = [0.0] * len(entries)
    norms = case.repeated.input_norms(layer)
    weight_o = case.engine.model.causal_lm.model.layers[layer].self_attn.o_proj.weight.double()
    for g, queries in enumerate(case.queries(layer, head, repeated=True)):
        columns = (head * GROUP + g) * DIM
        piece = weight_o[:, columns : columns + DIM]
        for i, query in enumerate(queries):
            for j, weight in enumerate(softmax_over(query, entries)):
                if plus:
                    weight *= float((piece @ entries[j][1]).norm()) / float(norms[i])
                scores[j] = max(scores[j], weight)
    return scores


def from_the_end(case, layer, head):
    return [float(j) for j in range(len(case.entries(layer, head)))]


def drawn(case, layer, head):
    generator = torch.Generator().manual_seed((5 * 1_000_003 + layer) * 1_009 + head)
    return torch.rand(len(case.entries(layer, head)), generator=generator).tolist()


def ranked_counts(scores, budget):
    """The best of each head, then the highest of the rest."""
    counts = dict.fromkeys(scores, 1)
    rest = [(score, place) for place, row in scores.items() for score in sorted(row)[:-1]]
    for _, place in sorted(rest, reverse=True)[: (budget - 1) * len(scores)]:
        counts[place] += 1
    return counts


def pyramid_counts(scores, budget):
    """4 entries a head over two layers: 4 / 20 in the last, where at least one is kept, and 7 in the first."""
    return {(layer, head): (7, 1)[layer] for layer, head in scores}


REFERENCES = {
    "recent": (from_the_end, dict.fromkeys, {}),
    "streaming_llm": (from_the_end, dict.fromkeys, {}),
    "random": (drawn, dict.fromkeys, {}),
    "h2o": (h2o, dict.fromkeys, {}),
    "snapkv": (snapkv, dict.fromkeys, {"window": 3}),
    "pyramidkv": (snapkv, pyramid_counts, {"window": 3}),
    "expected_attention": (expected_attention, dict.fromkeys, {"future": 5, "epsilon": 0.02}),
    "kvzip": (repeated_maximum, ranked_counts, {}),
    "kvzip_plus": (partial(repeated_maximum, plus=True), ranked_counts, {}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_what_is_kept_is_what_the_definition_keeps(case, name):
    budget, sinks = 4, 1
    reference, count, settings = REFERENCES[name]
    if name != "recent":
        settings = {**settings, "sinks": sinks}
    result = make_strategy(name, **settings).compact(CompactionRequest(case.engine, case.cache, budget, seed=5))
    places = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
    scores = {place: reference(case, *place) for place in places}
    if name != "recent":
        scores = {place: [INFINITE] * sinks + row[sinks:] for place, row in scores.items()}
    counts = count(scores, budget)
    for layer, head in places:
        row = scores[layer, head]
        rows = sorted(sorted(range(len(row)), key=lambda j: -row[j])[: counts[layer, head]])
        kept = result.cache.source(layer, 0, TOKENS).head(head)
        original = case.cache.source(layer, 0, TOKENS).head(head)
        assert kept[3].tolist() == original[3][rows].tolist(), (layer, head)
        for part, whole in zip(kept, original, strict=True):
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("name", ["h2o", "snapkv", "expected_attention", "kvzip", "kvzip_plus"])
def test_scores_are_the_definitions(case, name):
    reference, _, settings = REFERENCES[name]
    strategy = make_strategy(name, **settings)
    request = CompactionRequest(case.engine, case.cache, 4)
    for layer in range(LAYERS):
        found = strategy.score_layer(
            request, layer, case.cache.source(layer, 0, TOKENS), strategy.find_queries(request)
        )
        for head in range(KV_HEADS):
            expected = torch.tensor(reference(case, layer, head))
            measured = expected < 1e6
            torch.testing.assert_close(found[head][measured], expected[measured].float(), rtol=1e-4, atol=1e-6)
            forced = found[head][~measured]
            assert bool((forced > 1e6).all())
            assert forced.tolist() == sorted(set(forced.tolist()))


def test_expected_attention_without_its_parts(case):
    """Without covariance and value norm: the softmax of the mean query alone."""
    strategy = make_strategy("expected_attention", future=1, covariance=False, value_norm=False)
    request = CompactionRequest(case.engine, case.cache, 4)
    found = strategy.score_layer(request, 0, case.cache.source(0, 0, TOKENS), strategy.find_queries(request))
    for head in range(KV_HEADS):
        total = [0.0] * len(case.entries(0, head))
        for queries in case.queries(0, head):
            mean = sum(turned(query, -position) for position, query in enumerate(queries)) / TOKENS
            for j, weight in enumerate(softmax_over(turned(mean, TOKENS), case.entries(0, head))):
                total[j] += weight / GROUP
        torch.testing.assert_close(found[head], torch.tensor(total), rtol=1e-4, atol=1e-6)
