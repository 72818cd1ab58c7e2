"""The losses of both stages against plain float64 loops; equations 2 to 5, 8, 9, 10 and 13."""

from __future__ import annotations

import math

import pytest
import torch

from agentcompact.cache import Span, attend
from agentcompact.cache import attention as attention_module
from agentcompact.errors import CacheFileError
from agentcompact.fitting.adamw import adamw, moments, restore_moments
from agentcompact.fitting.attention_fitting import (
    AttentionFit,
    AttentionTargets,
    FitOptions,
    attention_loss,
    attention_targets,
    sample_rows,
    seeded,
)
from agentcompact.fitting.distillation import full_divergence, grouped_divergence, next_token_loss, rollout_loss

SCALING = 0.4


def plain_read(query, keys, values, bias):
    """One query's output and log-normalizer, number by number."""
    weights = [math.exp(SCALING * float(key @ query) + float(b)) for key, b in zip(keys, bias, strict=True)]
    total = sum(weights)
    output = sum((w / total) * value.double() for w, value in zip(weights, values, strict=True))
    return output, math.log(total)


def problem(lengths=(5, 9), full=20, group=2, m=7, dim=4, seed=0):
    torch.manual_seed(seed)
    heads = len(lengths)
    queries = torch.randn(heads, group, m, dim, dtype=torch.float64)
    everything = [
        (torch.randn(full, dim).double(), torch.randn(full, dim).double(), 0.3 * torch.randn(full).double())
        for _ in range(heads)
    ]
    kept = [tuple(part[:n].clone() for part in head) for head, n in zip(everything, lengths, strict=True)]
    return queries, everything, kept


def plain_loss(queries, everything, kept, match_mass=True):
    """Equation 8, for one layer whose KV heads are `kept`."""
    terms = []
    for head, (full, small) in enumerate(zip(everything, kept, strict=True)):
        for group in queries[head]:
            teacher = [plain_read(query, *full) for query in group]
            student = [plain_read(query, *small) for query in group]
            outputs = torch.stack([output for output, _ in teacher])
            masses = torch.tensor([mass for _, mass in teacher], dtype=torch.float64)
            spread = max(1e-4, float(((outputs - outputs.mean()) ** 2).mean().sqrt()))
            mean = float(outputs.mean())
            wrong = [
                ((a - mean) / spread - (b - mean) / spread) ** 2
                for (a, _), (b, _) in zip(teacher, student, strict=True)
            ]
            loss = float(torch.stack(wrong).mean())
            if match_mass:
                width = max(1e-4, float(((masses - masses.mean()) ** 2).mean().sqrt()))
                pairs = zip(teacher, student, strict=True)
                loss += sum(((a[1] - b[1]) / width) ** 2 for a, b in pairs) / len(teacher)
            terms.append(loss)
    return sum(terms) / len(terms)


def padded(kept):
    fills = (0.0, 0.0, torch.finfo(torch.float32).min / 2)
    return [
        torch.nn.utils.rnn.pad_sequence([head[part] for head in kept], batch_first=True, padding_value=fill)
        for part, fill in enumerate(fills)
    ]


@pytest.mark.parametrize("match_mass", [True, False])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9)])
def test_stage1_loss_is_equation_8(lengths, match_mass):
    queries, everything, kept = problem(lengths)
    reads = [
        [[plain_read(query, *full) for query in group] for group in heads]
        for heads, full in zip(queries, everything, strict=True)
    ]
    outputs = torch.stack([torch.stack([output for output, _ in group]) for heads in reads for group in heads])
    masses = torch.tensor([[mass for _, mass in group] for heads in reads for group in heads], dtype=torch.float64)
    shape = queries.shape[:3]
    targets = AttentionTargets.of(outputs.view(*shape, -1), masses.view(shape))
    found = attention_loss(queries, *padded(kept), targets, SCALING, match_mass=match_mass)
    assert float(found.mean()) == pytest.approx(plain_loss(queries, everything, kept, match_mass), rel=1e-9)


def test_targets_are_the_plain_read():
    queries, everything, _ = problem()
    found = attention_targets(queries, everything, SCALING)
    for head, full in enumerate(everything):
        for group in range(queries.shape[1]):
            for m, query in enumerate(queries[head, group]):
                output, mass = plain_read(query, *full)
                assert torch.allclose(found.output[head, group, m].double(), output, atol=1e-5)
                assert float(found.log_normalizer[head, group, m]) == pytest.approx(mass, abs=1e-5)


def test_scales_are_floored():
    flat = AttentionTargets.of(torch.ones(1, 1, 5, 3), torch.ones(1, 1, 5))
    assert flat.output_scale.item() == flat.mass_scale.item() == pytest.approx(1e-4)


def fit_of(queries, everything, kept, frozen, updates=40, **options):
    queries = queries.float()
    samples = torch.stack([sample_rows(seeded(1, 0), updates, 4, queries.shape[2])] * len(kept), dim=1)
    return AttentionFit(
        queries,
        attention_targets(queries, everything, SCALING),
        [tuple(part.float() for part in head) for head in kept],
        frozen,
        samples,
        len(kept),
        SCALING,
        FitOptions(queries=4, rate=1e-2, **options),
    )


def test_fit_trains_free_entries_alone_and_lowers_the_held_out_loss():
    queries, everything, kept = problem((6, 11), full=40, m=60)
    frozen = [torch.arange(len(head[0])) % 3 == 0 for head in kept]
    fit = fit_of(queries[:, :, :40], everything, kept, frozen, updates=200)
    held_out = queries[:, :, 40:]
    for update in range(200):
        fit.step(update)
    made = [tuple(part.double() for part in head) for head in fit.entries()]
    for old, new, fixed in zip(kept, made, frozen, strict=True):
        for before, after in zip(old, new, strict=True):
            before = before.float().double()
            assert torch.equal(before[fixed], after[fixed])
            assert not torch.isclose(before[~fixed], after[~fixed]).all()
    assert plain_loss(held_out, everything, made) < 0.8 * plain_loss(held_out, everything, kept)


def test_fit_of_ragged_heads_is_that_of_each_head_alone():
    """Padding has neither a parameter nor an influence."""
    queries, everything, kept = problem((3, 12), full=30, m=20)
    frozen = [torch.zeros(len(head[0]), dtype=torch.bool) for head in kept]
    both = fit_of(queries, everything, kept, frozen)
    assert sum(parameter.numel() for parameter in both.parameters) == sum(p.numel() for head in kept for p in head)
    alone = [fit_of(queries[h : h + 1], everything[h : h + 1], kept[h : h + 1], frozen[h : h + 1]) for h in range(2)]
    for update in range(40):
        together = both.step(update)
        apart = [each.step(update) for each in alone]
        assert together == pytest.approx(sum(apart) / 2, rel=1e-4)
    for joint, single in zip(both.entries(), (each.entries()[0] for each in alone), strict=True):
        for a, b in zip(joint, single, strict=True):
            assert torch.allclose(a, b, atol=2e-3)


def test_a_head_at_a_time_is_the_padded_call():
    """What a processor does with ragged heads, and what other devices do, in losses and gradients."""
    queries, everything, kept = problem((3, 12, 5), full=30, m=20)
    frozen = [torch.arange(len(head[0])) % 2 == 1 for head in kept]
    fit = fit_of(queries, everything, kept, frozen)
    found = []
    for apart in (True, False):
        assert fit._apart or not apart
        fit._apart = apart
        loss = fit.loss(3)
        found.append([loss, *torch.autograd.grad(loss.sum(), fit.parameters)])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_biases_can_be_left_alone():
    queries, everything, kept = problem()
    frozen = [torch.zeros(len(head[0]), dtype=torch.bool) for head in kept]
    fit = fit_of(queries, everything, kept, frozen, biases=False)
    fit.step(0)
    for (keys, _, bias), (before, _, known) in zip(fit.entries(), kept, strict=True):
        assert torch.equal(bias, known.float())
        assert not torch.equal(keys, before.float())


def test_moments_go_on_exactly():
    queries, everything, kept = problem()
    frozen = [torch.zeros(len(head[0]), dtype=torch.bool) for head in kept]
    whole = fit_of(queries, everything, kept, frozen)
    for update in range(10):
        whole.step(update)
    first = fit_of(queries, everything, kept, frozen)
    assert moments(first.optimiser) == {}
    for update in range(5):
        first.step(update)
    second = fit_of(queries, everything, first.entries(), frozen)
    restore_moments(second.optimiser, moments(first.optimiser))
    for update in range(5, 10):
        second.step(update)
    for a, b in zip(whole.entries(), second.entries(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_moments_of_something_else_are_refused():
    one, other = torch.zeros(3, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimiser = adamw([one], 1e-3, 0.0)
    one.grad = torch.ones(3)
    optimiser.step()
    with pytest.raises(CacheFileError, match="does not fit"):
        restore_moments(adamw([other], 1e-3, 0.0), moments(optimiser))


def test_samples_depend_on_seed_and_layer_alone():
    a = sample_rows(seeded(3, 1), 50, 128, 1000)
    assert a.shape == (50, 128)
    assert torch.equal(a, sample_rows(seeded(3, 1), 50, 128, 1000))
    assert not torch.equal(a, sample_rows(seeded(3, 2), 50, 128, 1000))


@pytest.mark.parametrize(("share", "apart"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_recited_rows_are_drawn_in_their_share(share, apart):
    drawn = sample_rows(seeded(3, 1), 400, 8, 100, last=30, share=share)
    assert drawn.shape == (400, 8)
    assert ((drawn >= 70).sum(dim=1) == apart).all()
    assert drawn.min() == (0 if share < 1 else 70)
    assert drawn.max() == (99 if share else 69)
    assert sample_rows(seeded(3, 1), 5, 8, 100, last=0, share=share).shape == (5, 8)


def plain_grouped(logits, ids, teacher):
    found = []
    for row, names, known in zip(logits, ids, teacher, strict=True):
        student = [float(x) for x in row.exp() / row.exp().sum()]
        p = [math.exp(float(x)) for x in known]
        r = [student[name] for name in names]
        tail, reached = max(1e-8, 1 - sum(p)), max(1e-8, 1 - sum(r))
        found.append(sum(a * math.log(a / b) for a, b in zip(p, r, strict=True)) + tail * math.log(tail / reached))
    return found


def distributions(steps=5, vocabulary=30, k=4):
    torch.manual_seed(3)
    logits = torch.randn(steps, vocabulary, dtype=torch.float64)
    teacher = 2 * torch.randn(steps, vocabulary, dtype=torch.float64)
    best = teacher.log_softmax(dim=1).topk(k, dim=1)
    return logits, teacher, best.indices, best.values


def test_grouped_divergence_is_equation_9():
    logits, teacher, ids, known = distributions()
    assert grouped_divergence(logits, ids, known).tolist() == pytest.approx(plain_grouped(logits, ids, known))
    assert grouped_divergence(teacher, ids, known).abs().max() < 1e-12
    assert (grouped_divergence(logits, ids, known) <= full_divergence(logits, teacher) + 1e-12).all()


def test_a_teacher_without_a_tail_is_floored():
    logits = torch.zeros(1, 3, dtype=torch.float64)
    found = grouped_divergence(logits, torch.tensor([[0]]), torch.tensor([[0.0]], dtype=torch.float64))
    assert float(found) == pytest.approx(math.log(3) + 1e-8 * (math.log(1e-8) - math.log(2 / 3)))


def test_full_divergence_is_the_sum_over_all_tokens():
    logits, teacher, _, _ = distributions()
    p, r = teacher.softmax(dim=1), logits.softmax(dim=1)
    expected = [
        sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(*rows, strict=True))
        for rows in zip(p, r, strict=True)
    ]
    assert full_divergence(logits, teacher).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("cross_entropy", [True, False])
def test_rollout_loss_is_equation_10(cross_entropy):
    logits, _, ids, known = distributions()
    tokens = ids[:, 0]
    divergence = grouped_divergence(logits, ids, known)
    expected = sum(plain_grouped(logits, ids, known)) / len(tokens)
    if cross_entropy:
        losses = [-math.log(float(row.softmax(0)[token])) for row, token in zip(logits, tokens, strict=True)]
        assert next_token_loss(logits, tokens).tolist() == pytest.approx(losses)
        expected += sum(losses) / len(losses)
    assert float(rollout_loss(logits, tokens, divergence, cross_entropy=cross_entropy)) == pytest.approx(expected)


def test_two_branches_are_one_softmax_over_biased_and_new_entries():
    """Equation 5: the merged branches equal one float64 softmax over compacted and subsequent entries."""
    torch.manual_seed(5)
    keys, values, bias = torch.randn(6, 4).double(), torch.randn(6, 4).double(), torch.randn(6).double()
    span = Span(keys, values, bias, torch.arange(6, dtype=torch.int32), (0, 6))
    query, key, value = (torch.randn(1, 1, 3, 4).double() for _ in range(3))
    found = attend(query, span, key, value, None, SCALING)[0, 0]
    for t in range(3):
        entries = [*zip(keys, values, bias, strict=True), *((key[0, 0, i], value[0, 0, i], 0.0) for i in range(t + 1))]
        weights = [math.exp(SCALING * float(k @ query[0, 0, t]) + float(b)) for k, _, b in entries]
        merged = sum(w / sum(weights) * v for w, (_, v, _) in zip(weights, entries, strict=True))
        assert torch.allclose(found[t], merged, atol=1e-9)


def test_padding_on_other_devices_gives_no_gradient():
    """The call that pads ragged heads gives each real entry the gradient of the loop, and padding none."""
    torch.manual_seed(6)
    leaves = [torch.randn(9, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)]
    bias = torch.randn(9, requires_grad=True)
    span = Span(*leaves, bias, torch.arange(9, dtype=torch.int32), (0, 2, 9))
    query = torch.randn(2, 4, 3, 4)
    output, mass = attention_module._span_branch(query, span, 0.5)
    loop = torch.autograd.grad((output.square().sum() + mass.sum()), [*leaves, bias])
    keys, values, padded_bias = attention_module._padded(span)
    folded = query.view(2, 2, 2, 3, 4).transpose(0, 1).reshape(1, 2, -1, 4)
    output, mass = attention_module.read_entries(folded, keys[None], values[None], padded_bias[None, :, None], 0.5)
    for a, b in zip(loop, torch.autograd.grad(output.square().sum() + mass.sum(), [*leaves, bias]), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
