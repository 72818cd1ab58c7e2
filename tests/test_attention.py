"""Attention over biased, ragged entries against an explicit softmax."""

from __future__ import annotations

import math

import pytest
import torch

from agentcompact.cache import Span, attend
from agentcompact.cache import attention as attention_module


@pytest.fixture(params=["fused", "plain"], autouse=True)
def kernel(request, monkeypatch):
    """Everything holds with PyTorch's fused kernel and without it, as on other devices."""
    if request.param == "plain":
        monkeypatch.setattr(attention_module, "FUSED", None)
    elif attention_module.FUSED is None:
        pytest.skip("this PyTorch has no fused kernel")


def explicit(query, span, key, value, scaling, seen=None):
    """One float64 softmax per query and head over that head's own entries and the tail."""
    batch, query_heads, q, _ = query.shape
    kv_heads, n = key.shape[1], key.shape[2]
    out = torch.zeros(batch, query_heads, q, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            kv = h // (query_heads // kv_heads)
            keys, values, bias, _ = span.head(kv)
            for i in range(q):
                tail = [j for j in range(n - q + i + 1) if seen is None or seen[b, j]]
                k = torch.cat([keys, key[b, kv, tail]]).double()
                v = torch.cat([values, value[b, kv, tail]]).double()
                scores = k @ query[b, h, i].double() * scaling
                scores[: len(keys)] += bias.double()
                out[b, h, i] = scores.softmax(0) @ v
    return out


def ragged_span(lengths, dim, spread=1.0):
    heads = [(torch.randn(n, dim) * spread, torch.randn(n, dim), torch.randn(n), torch.arange(n)) for n in lengths]
    return Span.from_heads(heads)


@pytest.mark.parametrize("lengths", [(5, 5), (1, 9), (12, 3)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 6), (1, 4, 4), (3, 5, 8)])
def test_equals_explicit_softmax(lengths, shape):
    torch.manual_seed(0)
    batch, q, n = shape
    query = torch.randn(batch, 6, q, 16)
    key, value = torch.randn(batch, 2, n, 16), torch.randn(batch, 2, n, 16)
    span = ragged_span(lengths, 16)
    assert torch.allclose(
        attend(query, span, key, value, None, 0.3).double(), explicit(query, span, key, value, 0.3), atol=1e-5
    )


def test_padded_call_equals_loop_and_gives_unused_slots_nothing(monkeypatch):
    """On a GPU ragged heads are padded for one call; the padding must weigh nothing, even with huge scores."""
    torch.manual_seed(1)
    span = ragged_span((2, 11, 5), 8, spread=30)
    query = torch.randn(2, 6, 3, 8) * 30
    output, mass = attention_module._span_branch(query, span, 0.5)
    keys, values, bias = attention_module._padded(span)
    assert keys.shape == (3, 11, 8)
    poisoned = values.clone()
    for head, length in enumerate(span.lengths):
        poisoned[head, length:] = 1e30
        assert (bias[head, length:] < -1e38).all()
    folded = query.view(2, 3, 2, 3, 8).transpose(0, 1).reshape(1, 3, -1, 8)
    for read in (values, poisoned):
        made = attention_module.read_entries(folded, keys[None], read[None], bias[None, :, None], 0.5)
        for padded, loop in zip(made, (output, mass), strict=True):
            unfolded = padded.view(3, 2, 2, 3, -1).transpose(0, 1).reshape(2, 6, 3, -1)
            assert torch.allclose(unfolded, loop, atol=1e-4)


@pytest.mark.parametrize("heads", [(0, 3), (0, 0)])
def test_heads_without_entries_read_the_tail_alone(heads):
    torch.manual_seed(9)
    span = ragged_span(heads, 8)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    assert torch.allclose(
        attend(query, span, key, value, None, 0.5).double(), explicit(query, span, key, value, 0.5), atol=1e-6
    )


def test_bias_of_log_two_is_the_entry_twice():
    torch.manual_seed(2)
    keys, values = torch.randn(7, 16), torch.randn(7, 16)
    bias = torch.zeros(7)
    bias[3] = math.log(2)
    once = Span.from_heads([(keys, values, bias, torch.arange(7))])
    order = [0, 1, 2, 3, 3, 4, 5, 6]
    twice = Span.from_heads([(keys[order], values[order], torch.zeros(8), torch.tensor(order))])
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16)
    a, b = (attend(query, span, key, value, None, 0.25) for span in (once, twice))
    assert torch.allclose(a, b, atol=1e-6)


def test_masks_boolean_and_additive():
    torch.manual_seed(3)
    span = ragged_span((4, 6), 8)
    query = torch.randn(2, 4, 3, 8)
    key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool)
    causal = torch.ones(3, 5, dtype=torch.bool).tril(2)
    mask = causal[None, None] & seen[:, None, None]
    expected = explicit(query, span, key, value, 0.5, seen)
    assert torch.allclose(attend(query, span, key, value, mask, 0.5).double(), expected, atol=1e-5)
    additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    assert torch.allclose(attend(query, span, key, value, additive, 0.5).double(), expected, atol=1e-5)


def test_a_query_that_sees_no_tail_reads_the_span_alone():
    torch.manual_seed(4)
    span = ragged_span((4,), 8)
    query, key, value = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    out = attend(query, span, key, value, torch.zeros(1, 1, 2, 2, dtype=torch.bool), 0.5)
    keys, values, bias, _ = span.head(0)
    expected = ((query[0, 0] @ keys.T) * 0.5 + bias).softmax(-1) @ values
    assert torch.allclose(out[0, 0], expected, atol=1e-6)


def test_query_blocks_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr(attention_module, "FUSED", None)
    torch.manual_seed(5)
    span = ragged_span((9, 4), 8)
    query, key, value = torch.randn(1, 4, 13, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    whole = attend(query, span, key, value, None, 0.4)
    monkeypatch.setattr(attention_module, "SCORE_ELEMENTS", 1)
    assert torch.allclose(attend(query, span, key, value, None, 0.4), whole, atol=1e-6)


def test_bfloat16_stays_near_float32():
    torch.manual_seed(6)
    span = ragged_span((30, 20), 16)
    query, key, value = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    exact = attend(query, span, key, value, None, 0.25)
    low = attend(query.bfloat16(), span.to(dtype=torch.bfloat16), key.bfloat16(), value.bfloat16(), None, 0.25)
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_large_scores_and_many_even_entries(dtype):
    """Scores in the thousands keep their differences, and a sum of 4,000 weights does not overflow."""
    torch.manual_seed(8)
    large = ragged_span((40,), 16, spread=20)
    query, key, value = torch.randn(1, 1, 1, 16) * 20, torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    low = attend(query.to(dtype), large.to(dtype=dtype), key.to(dtype), value.to(dtype), None, 0.25)
    exact = attend(
        query.to(dtype).float(), large.to(dtype=dtype).to(dtype=torch.float32),
        key.to(dtype).float(), value.to(dtype).float(), None, 0.25,
    )  # fmt: skip
    assert (low.float() - exact).abs().max() < 0.02
    n = 4000
    even = Span.from_heads([(torch.zeros(n, 16), torch.full((n, 16), 20.0), torch.zeros(n), torch.arange(n))])
    out = attend(query.to(dtype), even.to(dtype=dtype), key.to(dtype) * 0, value.to(dtype) * 0, None, 0.25)
    assert (out.float() - 20 * n / (n + 1)).abs().max() < 0.2


def test_gradients_reach_keys_values_and_biases():
    torch.manual_seed(7)
    base = ragged_span((3, 5), 4)
    leaves = [t.double().requires_grad_() for t in (base.keys, base.values, base.bias)]
    query, key, value = (torch.randn(1, h, n, 4, dtype=torch.float64) for h, n in ((2, 2), (2, 3), (2, 3)))

    def read(keys, values, bias):
        span = Span(keys, values, bias, base.positions, base.offsets)
        return attend(query, span, key, value, None, 0.5)

    assert torch.autograd.gradcheck(read, leaves)
