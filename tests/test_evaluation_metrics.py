"""Metrics against slow, plain references."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact.engines import TransformersEngine
from agentcompact.evaluation.asking import ask, encode_questions
from agentcompact.evaluation.metrics.answers import answer_score, mean_log_probability
from agentcompact.evaluation.metrics.attention import HeldOutAttention
from agentcompact.evaluation.metrics.speed import decode_rate
from agentcompact.evaluation.records import Question
from agentcompact.fitting.continuation_fidelity import continuation_fidelity
from agentcompact.strategies import CompactionRequest, make_strategy

LENGTH = 60


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def engine(request):
    return TransformersEngine(tiny_model(request.param))


@pytest.fixture(scope="module")
def full(engine):
    return engine.prefill(tiny_tokens(LENGTH), capture_seed=0)


def compacted(engine, full, strategy, budget=12, **settings):
    return make_strategy(strategy, **settings).compact(CompactionRequest(engine, full, budget)).cache


@pytest.mark.parametrize(
    ("text", "answers", "match", "score"),
    [
        ("it is 4821.", ["4821"], "any", 1.0),
        ("it is 482 1", ["4821"], "any", 0.0),
        ("ONCOLOGY", ["x", "oncology"], "any", 1.0),
        ("a and b", ["A", "B", "c"], "all", 2 / 3),
        ("a and b", ["A", "B"], "all", 1.0),
        ("", ["a"], "all", 0.0),
        ("a", [], "any", None),
    ],
)
def test_answer_score(text, answers, match, score):
    assert answer_score(text, answers, match) == score


def test_fidelity_is_the_mean_divergence_of_all_tokens():
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(n, 11, generator=generator) for n in (3, 1)] + [torch.empty(0, 1)]
    other = [torch.randn(n, 11, generator=generator) for n in (3, 1)] + [torch.empty(0, 1)]
    divergences, same = [], []
    for reference, logits in zip(full, other, strict=True):
        for p_row, q_row in zip(reference, logits, strict=True):
            p, q = p_row.softmax(0).tolist(), q_row.softmax(0).tolist()
            divergences.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            same.append(p.index(max(p)) == q.index(max(q)))
    kl, top1 = continuation_fidelity(full, other)
    assert kl == pytest.approx(sum(divergences) / 4, rel=1e-5)
    assert top1 == sum(same) / 4
    assert continuation_fidelity(full, full) == (0.0, 1.0)
    assert continuation_fidelity([torch.empty(0, 1)], [torch.empty(0, 1)]) == (None, None)


def test_questions_in_batches_give_what_each_gives_alone(engine, full):
    """Answers, logits on given continuations, and options, behind prompts of several lengths."""
    questions = [
        Question(
            question=tiny_text(3 + index, seed=index),
            answers=("w5", "w9"),
            options=(" w5", " w6 w7 w8", " w9") if index % 2 else (),
            label=1 if index % 2 else None,
            kind=f"kind {index}",
            max_new_tokens=4 if index < 3 else 6,
        )
        for index in range(5)
    ]
    prompts = encode_questions(engine, questions)
    continuations = [tiny_tokens(2 + index, seed=9 + index) for index in range(4)] + [[]]
    cache = compacted(engine, full, "two_pass")
    asked = ask(engine, cache, prompts, continuations)
    for prompt, result, logits, tokens in zip(prompts, asked.results, asked.logits, continuations, strict=True):
        (alone,) = ask(engine, cache, [prompt]).results
        assert result.answer == alone.answer
        assert result.score == float("w5" in alone.answer or "w9" in alone.answer)
        assert result.kind == prompt.question.kind
        if tokens:
            plain = engine.next_token_logits(cache.fork(), [*prompt.token_ids, *tokens[:-1]])
            assert torch.allclose(logits, plain[len(prompt.token_ids) - 1 :], atol=2e-5)
        scores = []
        for option in prompt.options:
            row = engine.next_token_logits(cache.fork(), [*prompt.token_ids, *option[:-1]])[len(prompt.token_ids) - 1 :]
            scores.append(sum(float(r.log_softmax(0)[t]) for r, t in zip(row, option, strict=True)) / len(option))
            assert mean_log_probability(row, option) == pytest.approx(scores[-1], abs=1e-5)
        assert result.choice == (scores.index(max(scores)) if scores else None)
        assert result.choice_score == (None if not scores else float(result.choice == 1))
    assert asked.logits[4].shape[0] == 0
    assert cache.next_position == LENGTH


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("two_pass", {}), ("high_attn", {"budgets": "global"}), ("streaming_llm", {}), ("none", {})],
)
def test_attention_errors_against_loops(engine, full, strategy, settings):
    turns = [tiny_tokens(7, seed=3), tiny_tokens(5, seed=4)]
    cache = compacted(engine, full, strategy, **settings)
    errors = HeldOutAttention(engine, full, turns, seed=0).compare(cache)
    captured = engine.capture(turns, 0, after=full)
    scaling, groups = engine.geometry.scaling, engine.geometry.query_heads // engine.geometry.kv_heads
    output, mass, log_mass, kept, shared = [], [], [], 0, 0
    for index, _ in full.full_layers:
        queries, context = captured.layer(index).double(), full.captured.layer(index, 0, LENGTH).double()
        whole, small = full.source(index, 0, LENGTH), cache.source(index, 0, LENGTH)
        distance = norm = 0.0
        for head in range(queries.shape[0]):
            (k, v, _, _), (ck, cv, bias, _) = (
                [t.double() for t in span.head(head // groups)] for span in (whole, small)
            )
            for q in queries[head]:
                weights, less = (k @ q * scaling).exp(), (ck @ q * scaling + bias).exp()
                o, c = weights @ v / weights.sum(), less @ cv / less.sum()
                distance, norm = distance + float((o - c).square().sum()), norm + float(o.square().sum())
                mass.append(float((less.sum() / weights.sum() - 1).abs()))
                log_mass.append(float((less.sum() / weights.sum()).log().abs()))
        output.append(math.sqrt(distance / norm))
        for head in range(whole.heads):
            k, positions = whole.head(head)[0].double(), small.head(head)[3].tolist()
            rows = context[head * groups : (head + 1) * groups].reshape(-1, k.shape[1])
            score = (rows @ k.T * scaling).softmax(1).square().mean(0)
            best = set(score.argsort(descending=True)[: len(positions)].tolist())
            kept, shared = kept + len(positions), shared + len(best & set(positions))
    assert errors.output == pytest.approx(sum(output) / len(output), rel=1e-4, abs=1e-6)
    assert errors.mass == pytest.approx(sum(mass) / len(mass), rel=1e-4, abs=1e-6)
    assert errors.log_mass == pytest.approx(sum(log_mass) / len(log_mass), rel=1e-4, abs=1e-6)
    assert errors.overlap == shared / kept
    if strategy == "none":
        assert (errors.output, errors.mass, errors.log_mass, errors.overlap) == (0, 0, 0, 1)


def test_keys_that_were_made_have_no_overlap(engine, full):
    held_out = HeldOutAttention(engine, full, [tiny_tokens(7, seed=3)], seed=0)
    cache = compacted(engine, full, "two_pass")
    (_, layer), *_ = cache.full_layers
    layer.span.keys[0] += 1
    assert held_out.compare(cache).overlap is None


def test_a_cache_of_other_text_is_not_compared(engine, full):
    held_out = HeldOutAttention(engine, full, [tiny_tokens(7, seed=3)], seed=0)
    assert held_out.compare(engine.prefill(tiny_tokens(LENGTH - 1))) is None


def test_decode_rate_leaves_the_cache_alone(engine, full):
    assert decode_rate(engine, full, 5, tokens=3) > 0
    assert full.next_position == LENGTH
    assert decode_rate(engine, full, 5, tokens=engine.geometry.max_positions) is None
