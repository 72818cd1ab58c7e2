"""Teacher rollouts: batches against one prompt after another, their store, and the bank of prompts."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from tiny import tiny_model, tiny_tokens

from agentcompact import TransformersEngine, wrap_model
from agentcompact.errors import ContextLengthError, DocumentError, SettingsError
from agentcompact.queries.recitation import recitations
from agentcompact.queries.rollout_prompts import read_prompt_bank
from agentcompact.queries.rollout_store import RolloutStore, rollout_key
from agentcompact.queries.rollouts import Rollouts, evenly_spaced, greedy_answers, teacher_rollouts

PROMPTS = [tiny_tokens(length, seed=length) for length in (5, 9, 3, 7, 9)]


def double_engine(kind):
    loaded = tiny_model(kind)
    return TransformersEngine(wrap_model(loaded.causal_lm.double(), loaded.tokenizer, name=f"double-{kind}"))


def one_by_one(engine, document, prompt, most, ends):
    """Decode greedily, a whole pass for each token; return tokens, logits of each step, and queries of all tokens."""
    tokens, logits = [], []
    while len(tokens) < most:
        behind = engine.prefill(document)
        logits.append(engine.next_token_logits(behind, [*prompt, *tokens])[-1])
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] in ends:
            break
    read = [*prompt, *(token for token in tokens if token not in ends)]
    queries = {}

    def keep(layer, query):
        queries[layer] = query[0].clone()

    behind = engine.prefill(document)
    with behind.observed(keep):
        engine.next_token_logits(behind, read)
    return tokens, torch.stack(logits), queries


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [2, 8])
def test_batches_equal_one_after_another(kind, batch):
    engine, document = double_engine(kind), tiny_tokens(40)
    first = one_by_one(engine, document, PROMPTS[1], 6, set())[0]
    engine.model.causal_lm.generation_config.eos_token_id = first[3]  # so that some answer ends before the limit
    ends = {first[3], engine.model.tokenizer.eos_token_id}
    cache = engine.prefill(document)
    answers = greedy_answers(engine, cache, PROMPTS, 6, batch)
    found = teacher_rollouts(engine, cache, answers, top=4, pool=10_000, batch=batch)
    expected = [one_by_one(engine, document, prompt, 6, ends) for prompt in PROMPTS]
    assert len(found.items[1].tokens) == first.index(first[3]) + 1 < 6
    for item, prompt, (tokens, logits, _) in zip(found.items, PROMPTS, expected, strict=True):
        assert item.prompt == prompt
        assert item.tokens == tokens
        best = logits.topk(4, dim=1)
        assert torch.equal(item.top_ids, best.indices)
        assert torch.allclose(item.top_logits.float(), best.values, atol=1e-5)
        assert torch.allclose(
            item.top_log_probabilities.float(), logits.log_softmax(1).topk(4, dim=1).values, atol=1e-5
        )
    for layer, queries in found.queries.items():
        assert torch.allclose(queries, torch.cat([made[layer] for _, _, made in expected], dim=1), atol=1e-9)
    assert cache.next_position == 40


def test_the_pool_is_evenly_spaced_over_all_positions():
    engine, document = double_engine("llama"), tiny_tokens(30)
    cache = engine.prefill(document)
    answers = greedy_answers(engine, cache, PROMPTS, 5, 3)
    everything = teacher_rollouts(engine, cache, answers, pool=10_000)
    total = sum(answer.read for answer in answers)
    some = teacher_rollouts(engine, cache, answers, pool=11, batch=2)
    rows = [number * (total - 1) // 10 for number in range(11)]
    for layer, queries in some.queries.items():
        assert queries.shape[1] == 11
        assert torch.allclose(queries, everything.queries[layer][:, rows], atol=1e-9)


@pytest.mark.parametrize(("total", "most"), [(5, 9), (10, 10), (1000, 7), (28_800, 4096), (3, 1)])
def test_evenly_spaced(total, most):
    rows = evenly_spaced(total, most).tolist()
    assert len(rows) == len(set(rows)) == min(total, most)
    assert rows[0] == 0
    if most > 1:
        assert rows[-1] == total - 1
        steps = {b - a for a, b in itertools.pairwise(rows)}
        assert max(steps) - min(steps) <= 1


def test_recitations_repeat_the_span_and_follow_the_answers():
    engine = double_engine("llama")
    cache = engine.prefill(tiny_tokens(50))
    made = recitations(engine, cache, 10, 47, length=15)
    assert [len(each.tokens) for each in made] == [15, 15, 7]
    assert [token for each in made for token in each.tokens] == cache.token_ids[10:47]
    assert not any(each.ended for each in made)
    answers = teacher_rollouts(engine, cache, greedy_answers(engine, cache, PROMPTS, 5, 3))
    recited = teacher_rollouts(engine, cache, made, pool=20)
    both = answers.joined(recited)
    assert both.items == [*answers.items, *recited.items]
    assert (both.recited, both.recited_positions) == (3, 20)
    for layer, queries in both.queries.items():
        assert torch.equal(queries[:, -20:], recited.queries[layer])
        assert torch.equal(queries[:, :-20], answers.queries[layer])
    expected = engine.next_token_logits(cache.fork(), [*made[1].prompt, *made[1].tokens])[len(made[1].prompt) - 1 : -1]
    assert torch.equal(recited.items[1].top_ids[:, 0], expected.argmax(dim=1))
    assert answers.joined(Rollouts([], {})) is answers


def test_forced_logits_are_those_of_next_token_logits():
    engine, document = double_engine("qwen3"), tiny_tokens(25)
    cache = engine.prefill(document)
    turns = [(tiny_tokens(4, seed=1), tiny_tokens(6, seed=2)), (tiny_tokens(7, seed=3), tiny_tokens(2, seed=4))]
    for (prompt, answer), found in zip(turns, engine.forced_logits(cache, turns), strict=True):
        behind = engine.prefill(document)
        expected = engine.next_token_logits(behind, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert torch.allclose(found.float(), expected, atol=1e-5)
    assert cache.next_position == 25


def test_forced_logits_refuse_nothing_and_what_does_not_fit():
    engine = double_engine("llama")
    cache = engine.prefill(tiny_tokens(500))
    with pytest.raises(DocumentError, match="at least one token each"):
        engine.forced_logits(cache, [([5], [])])
    with pytest.raises(ContextLengthError, match="do not fit"):
        engine.forced_logits(cache, [(tiny_tokens(20), tiny_tokens(20))])


def small(engine):
    cache = engine.prefill(tiny_tokens(30))
    answers = greedy_answers(engine, cache, PROMPTS, 4, 3)
    return cache, answers, teacher_rollouts(engine, cache, answers, pool=12)


def test_store_gives_back_what_it_got(tmp_path):
    engine = TransformersEngine(tiny_model("llama"))
    _, answers, made = small(engine)
    store = RolloutStore(tmp_path / "rollouts", "k")
    assert store.load() is None
    assert store.load_answers() == {}
    store.save_answers(dict(enumerate(answers[:2])))
    assert store.load_answers() == dict(enumerate(answers[:2]))
    store.save(made)
    assert store.load_answers() == {}
    found = store.load()
    for a, b in zip(found.items, made.items, strict=True):
        assert (a.prompt, a.tokens) == (b.prompt, b.tokens)
        assert torch.equal(a.top_ids, b.top_ids)
        assert torch.equal(a.top_log_probabilities, b.top_log_probabilities)
    assert all(torch.equal(found.queries[layer], queries) for layer, queries in made.queries.items())
    (file,) = (tmp_path / "rollouts").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(file.read_bytes()[:100])
    assert store.load() is None


def test_known_answers_are_not_made_again():
    engine = TransformersEngine(tiny_model("llama"))
    cache, answers, _ = small(engine)
    engine.counters.decoded_tokens = 0
    again = greedy_answers(engine, cache, PROMPTS, 4, 3, known=dict(enumerate(answers)))
    assert again == answers
    assert engine.counters.decoded_tokens == 0


def test_key_tells_documents_prompts_limits_and_compactions_apart():
    engine = TransformersEngine(tiny_model("llama"))
    cache = engine.prefill(tiny_tokens(30))
    spans = [layer.all_entries() for _, layer in cache.full_layers]
    compacted = cache.replaced(spans, 0, 30)
    changed = cache.replaced([type(s)(s.keys + 1, s.values, s.bias, s.positions, s.offsets) for s in spans], 0, 30)
    keys = {
        rollout_key(cache, PROMPTS, 24, 20, 4096),
        rollout_key(engine.prefill(tiny_tokens(30, seed=9)), PROMPTS, 24, 20, 4096),
        rollout_key(cache, PROMPTS[1:], 24, 20, 4096),
        rollout_key(cache, PROMPTS, 12, 20, 4096),
        rollout_key(cache, PROMPTS, 24, 20, 100),
        rollout_key(compacted, PROMPTS, 24, 20, 4096),
        rollout_key(changed, PROMPTS, 24, 20, 4096),
        rollout_key(TransformersEngine(tiny_model("llama", seed=1)).prefill(tiny_tokens(30)), PROMPTS, 24, 20, 4096),
    }
    assert len(keys) == 8
    assert rollout_key(engine.prefill(tiny_tokens(30)), PROMPTS, 24, 20, 4096) in keys


def test_the_bank_is_general():
    bank = read_prompt_bank()
    assert (len(bank.requests), len(bank.instructions)) == (24, 20)
    prompts = bank.prompts()
    assert len(set(prompts)) == 480
    asked_for = re.compile(
        r"\b(names?|numbers?|digits?|dates?|phone|entry|entries|list|quote|values?)\b", re.IGNORECASE
    )
    assert not [prompt for prompt in prompts if asked_for.search(prompt)]
    first = bank.prompts(24)
    assert len({prompt for prompt in first for request in bank.requests if prompt.startswith(request)}) == 24
    assert prompts[:24] == first


def test_a_focus_adds_requests():
    bank = read_prompt_bank()
    focused = bank.prompts(focus=" the harbour ")
    assert len(focused) == 20 * (24 + len(bank.focus_requests))
    assert sum("this: the harbour" in prompt for prompt in focused) == 20 * len(bank.focus_requests)
    assert "the harbour" in bank.prompts(1, focus="the harbour")[0]


def test_a_bank_of_ones_own(tmp_path):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps({"requests": ["A."], "instructions": ["B.", "C."]}))
    assert read_prompt_bank(str(path)).prompts() == ["A. B.", "A. C."]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON"), ('{"requests": [], "instructions": ["a"]}', "requests"), ('{"ask": 1}', "prompts_file")],
)
def test_a_bank_that_is_none(tmp_path, text, message):
    path = tmp_path / "bank.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_prompt_bank(str(path))
    with pytest.raises(SettingsError, match="No such file"):
        read_prompt_bank(str(tmp_path / "none.json"))
