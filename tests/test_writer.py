"""The writer itself: its equations, its settings, chunks, and what it writes into spans."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_model, tiny_tokens
from writers import tiny_writer

from agentcompact import CompactionRequest, Span, TransformersEngine
from agentcompact.writers import FastDiamond, WriterSettings, plan_chunks, write_span


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"))


def reference(writer, layer, keys, values, bias, count):
    """The paper's equations 7 to 9 and 11 for one head, number by number; keys, values: (n, d)."""
    settings, n, d = writer.settings, len(keys), keys.shape[1]
    width, share = 2 * d, n / count

    def of(parameter):
        part = parameter[layer if parameter.shape[0] > 1 else 0]
        return part[0]

    def rotate(row, place):
        turned = row.clone()
        for i in range(d):
            angle = place * settings.rope_base ** (-i / d)
            turned[i] = row[i] * math.cos(angle) - row[i + d] * math.sin(angle)
            turned[i + d] = row[i + d] * math.cos(angle) + row[i] * math.sin(angle)
        return turned

    unit = share if settings.rope_unit == "latent" else 1
    read_keys, read_values = torch.zeros(count, d).double(), torch.zeros(count, d).double()
    x = torch.cat([keys, values], dim=1)
    key_rows = [row @ of(writer.key) for row in x]
    key_rows = [rotate(row / row.norm(), j / unit) for j, row in enumerate(key_rows)]
    for i in range(count):
        z = of(writer.latents)[i * settings.latents // count]
        query = rotate(z / z.norm(), i * share / unit)
        scores = torch.stack([width * (query @ row) + bias[j] for j, row in enumerate(key_rows)])
        weights = scores.exp() / scores.exp().sum()
        written = sum(weight * (row @ of(writer.value)) for weight, row in zip(weights, x, strict=True))
        written = written @ of(writer.output)
        read_keys[i] = written @ torch.eye(width).double()[:, :d]
        read_values[i] = written @ torch.eye(width).double()[:, d:]
    return read_keys, read_values


@pytest.mark.parametrize("unit", ["latent", "entry"])
@pytest.mark.parametrize("count", [6, 4, 1])
def test_the_forward_is_the_papers_equations_in_float64(count, unit):
    generator = torch.Generator().manual_seed(0)
    writer = FastDiamond(WriterSettings(context=20, latents=6, rope_unit=unit, initialisation="kvid"), 2, 1, 4).double()
    with torch.no_grad():
        for parameter in writer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    keys, values = (torch.randn(1, 20, 4, generator=generator).double() for _ in range(2))
    bias = torch.randn(1, 20, generator=generator).double()
    for layer in range(2):
        written = writer(layer, keys, values, bias, count)
        for given, expected in zip(written, reference(writer, layer, keys[0], values[0], bias[0], count), strict=True):
            torch.testing.assert_close(given[0], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("unit", ["latent", "entry"])
def test_nothing_is_remembered_of_parameters_that_changed(unit):
    settings = WriterSettings(context=20, latents=6, rope_unit=unit, initialisation="kvid")
    writer = FastDiamond(settings, 2, 1, 4)
    keys, values = torch.randn(2, 1, 20, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(1, 20)
    with torch.no_grad():
        for count in (6, 6, 3):
            before = [writer(layer, keys, values, bias, count) for layer in range(2)]
        for parameter in writer.parameters():
            parameter.mul_(1.5).add_(0.01 * torch.arange(parameter.shape[-1]))
        for count in (6, 3):
            remembered = [writer(layer, keys, values, bias, count) for layer in range(2)]
            with torch.enable_grad():
                anew = [writer(layer, keys, values, bias, count) for layer in range(2)]
            for given, expected in zip(remembered, anew, strict=True):
                torch.testing.assert_close(given, expected)
        assert not torch.allclose(before[0][0], remembered[0][0])
        half = writer(0, keys[:, :10], values[:, :10], bias[:, :10], 6)
        with torch.enable_grad():
            torch.testing.assert_close(half, writer(0, keys[:, :10], values[:, :10], bias[:, :10], 6))
        writer.double()
        assert writer(0, keys.double(), values.double(), bias, 6)[0].dtype == torch.float64


def test_biases_that_are_zero_still_have_their_gradient():
    """In recurrent training the second application reads trained biases, which begin as zeros."""
    writer = FastDiamond(WriterSettings(context=8, latents=2, weights="trained"), 1, 1, 4)
    keys, values = torch.randn(2, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(1, 8, requires_grad=True)
    made = writer.biases(0, bias, 2)
    torch.testing.assert_close(made, writer.biases(0, bias.detach(), 2))
    made.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((1, 8), 2 / 8))
    bias.grad = None
    (writer(0, keys, values, bias, 2)[0] ** 2).sum().backward()
    assert float(bias.grad.abs().max()) > 0


def test_a_writer_made_in_inference_mode_writes():
    with torch.inference_mode():
        writer = FastDiamond(WriterSettings(context=8, latents=2), 1, 1, 4)
        keys, values = torch.randn(2, 1, 8, 4)
        assert torch.isfinite(writer(0, keys, values, torch.zeros(1, 8), 2)[0]).all()


def test_biases_enter_the_logits():
    """An entry with weight w counts as w equal entries at its place would."""
    writer = FastDiamond(WriterSettings(context=8, latents=1, rope_unit="entry"), 1, 1, 4)
    keys, values = torch.randn(2, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(1, 8)
    plain = writer(0, keys, values, bias, 1)[0]
    bias[0, 3] = 20.0
    alone = writer(0, keys, values, bias, 1)
    torch.testing.assert_close(alone[0][0, 0], keys[0, 3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone[1][0, 0], values[0, 3], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, alone[0])
    bias[0, 3] = -1e9
    without = writer(0, keys, values, bias, 1)[0]
    keys[0, 3] += 5.0  # what has no weight does not matter
    torch.testing.assert_close(writer(0, keys, values, bias, 1)[0], without)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "yarn", "linear", "dynamic", "llama3", "proportional"])
def test_keys_rotated_back_and_forth_are_the_same(kind):
    ropes = {
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4},
        "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
        "proportional": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    changes = {"rope_parameters": ropes[kind]} if kind in ropes else {}
    engine = TransformersEngine(tiny_model("llama" if kind in ropes else kind, **changes))
    cache = engine.prefill(tiny_tokens(30))
    for index, _ in cache.full_layers:
        span = cache.source(index, 0, 30)
        keys, positions = span.dense(span.keys), span.dense(span.positions)
        plain = engine.rotate(keys, positions, back=True)
        torch.testing.assert_close(engine.rotate(plain, positions), keys, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(plain, keys)


@pytest.mark.parametrize("sharing", ["global", "layer", "head", "layer_head"])
def test_what_is_shared_has_one_set(sharing):
    settings = WriterSettings(context=8, latents=4, share_latents=sharing, share_projections=sharing)
    writer = FastDiamond(settings, 3, 2, 4)
    sets = (3 if "layer" in sharing else 1, 2 if "head" in sharing else 1)
    assert writer.latents.shape == (*sets, 4, 8)
    assert writer.key.shape == writer.value.shape == writer.output.shape == (*sets, 8, 8)
    keys = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    whole = writer(2, keys, keys, torch.zeros(2, 8), 4)[0]
    one = writer(2, keys[1:], keys[1:], torch.zeros(1, 8), 4, slice(1, 2))[0]
    torch.testing.assert_close(one, whole[1:])


def test_how_it_begins():
    identity = FastDiamond(WriterSettings(context=8, latents=10, initialisation="identity"), 1, 1, 4)
    for part in (identity.key, identity.value, identity.output):
        assert torch.equal(part[0, 0], torch.eye(8))
    assert torch.equal(identity.latents[0, 0], torch.cat([torch.eye(8), torch.eye(8)[:2]]))
    random = FastDiamond(WriterSettings(context=8, latents=10, initialisation="kvid"), 1, 1, 4)
    assert torch.equal(random.value[0, 0], torch.eye(8))
    assert torch.equal(random.output[0, 0], torch.eye(8))
    assert not torch.equal(random.key[0, 0], torch.eye(8))
    assert random.latents.abs().min() > 0


def test_an_anchored_latent_reads_the_first_entry():
    writer = FastDiamond(WriterSettings(context=16, latents=4), 2, 2, 4)
    keys, values = torch.randn(2, 2, 16, 4, generator=torch.Generator().manual_seed(0))
    keys[:, 0] *= 5
    for layer in range(2):
        writer.anchor(layer, keys[None, :, 0], values[None, :, 0])
    written = writer(1, keys, values, torch.zeros(2, 16), 4)
    likeness = torch.nn.functional.cosine_similarity(written[0][:, :1], keys, dim=-1)
    assert likeness[:, 0].min() > 0.98
    assert likeness.argmax(dim=1).tolist() == [0, 0]


SIZES = [(n, t) for n in (2, 7, 24, 25, 100, 1000) for t in (1, 2, 6, 8, 9, 30, 99) if t < n]


@pytest.mark.parametrize(("entries", "budget"), SIZES)
def test_chunks_share_entries_and_budget(entries, budget):
    chunks = plan_chunks(entries, budget, 24, 8)
    assert chunks[0].start == 0
    assert [chunk.stop for chunk in chunks[:-1]] == [chunk.start for chunk in chunks[1:]]
    assert chunks[-1].stop == entries
    assert sum(chunk.count for chunk in chunks) == budget
    for chunk in chunks:
        assert 1 <= chunk.count <= min(8, chunk.stop - chunk.start)
        assert chunk.stop - chunk.start <= 24 + math.ceil(entries / budget) or budget < entries / 24


def test_ragged_heads_are_written_one_by_one(engine):
    cache = engine.prefill(tiny_tokens(40))
    span = cache.source(0, 0, 40)
    ragged = Span.from_heads([span.head(0), tuple(part[:5] for part in span.head(1))])
    writer, _ = tiny_writer(engine)
    with torch.no_grad():
        written = write_span(writer, 0, ragged, 8, engine.rotate)
        whole = write_span(writer, 0, span, 8, engine.rotate)
    assert written.lengths == (8, 5)  # a head that holds no more than the budget keeps its entries
    torch.testing.assert_close(written.head(0)[0], whole.head(0)[0])
    assert torch.equal(written.head(1)[0], ragged.head(1)[0])


@pytest.mark.parametrize("positions", ["spread", "packed"])
@pytest.mark.parametrize("weights", ["none", "conserved"])
def test_where_entries_stand_and_what_they_weigh(engine, positions, weights):
    cache = engine.prefill(tiny_tokens(24))
    writer, _ = tiny_writer(engine, positions=positions, weights=weights)
    with torch.no_grad():
        span = write_span(writer, 1, cache.source(1, 0, 24), 8, engine.rotate)
        again = write_span(writer, 1, span, 4, engine.rotate)
    assert span.head(1)[3].tolist() == (list(range(8)) if positions == "packed" else list(range(0, 24, 3)))
    for each, count in ((span, 8), (again, 4)):
        total = 24.0 if weights == "conserved" else count
        for head in each:
            assert float(head[2].exp().sum()) == pytest.approx(total, rel=1e-5)


def test_the_request_is_not_needed_to_be_whole(engine):
    """A span in the middle is written from its own entries, at its own positions."""
    cache = engine.prefill(tiny_tokens(60))
    request = CompactionRequest(engine=engine, cache=cache, budget=4, start=20, stop=44)
    writer, _ = tiny_writer(engine)
    with torch.no_grad():
        span = write_span(writer, 0, cache.source(0, request.start, request.end), 4, engine.rotate)
    assert span.head(0)[3].tolist() == [20, 26, 32, 38]
