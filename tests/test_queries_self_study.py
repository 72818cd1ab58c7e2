"""Self-study queries, and queries of several kinds joined."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import EngineSettings, TransformersEngine, compact
from agentcompact.engines import question_ids
from agentcompact.errors import CacheError, CapabilityError, ContextLengthError, SettingsError
from agentcompact.queries import (
    Study,
    context_prefill_queries,
    reference_queries,
    repeat_prefill_queries,
    self_study_queries,
)
from agentcompact.queries.self_study import _question
from agentcompact.queries.self_study_prompts import (
    QUESTIONS,
    STATEMENT_OPENINGS,
    STATEMENTS,
    StudyPrompt,
    study_prompts,
)
from agentcompact.settings import SamplingSettings


def prefilled(kind="llama", tokens=40, **settings):
    engine = TransformersEngine(tiny_model(kind), EngineSettings(**settings))
    return engine, engine.prefill(tiny_tokens(tokens), capture_seed=0)


def reference_turns(engine, cache, prompts, seed, answer_tokens, focus=None):
    """One prompt after the other, each behind a cache of its own: (turn token ids, questions asked)."""
    form = cache.metadata.prompt
    sampling = SamplingSettings(max_new_tokens=answer_tokens, stop=form.stop)

    def answer(text, opening=None):
        ids = question_ids(engine, form, text)
        if opening is not None:
            ids += engine.encode(opening)
        found = engine.decode(engine.prefill(cache.token_ids), [ids], sampling)[0]
        return [*ids, *found.token_ids], found.text

    turns, asked = [], []
    for prompt in study_prompts(prompts, seed, focus):
        turn, text = answer(prompt.text, prompt.opening)
        turns.append(turn)
        text = (prompt.opening + text).strip()
        if prompt.asks and text not in asked:
            asked.append(text)
    return [*turns, *(answer(text)[0] for text in asked)], asked


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("batch_size", [3, 16])
def test_queries_are_those_of_the_models_own_turns(kind, batch_size):
    """Compared with a plain run of each turn behind the whole text, one sequence each."""
    engine, cache = prefilled(kind, batch_size=batch_size)
    turns, asked = reference_turns(engine, cache, 6, seed=2, answer_tokens=5)
    assert len(turns) == 6 + len(asked) > 6
    store = self_study_queries(engine, cache, 0, 40, 2, study=Study(prompts=6, answer_tokens=5))
    expected = [engine.prefill([*cache.token_ids, *turn], capture_seed=0).captured.layer(1, 40) for turn in turns]
    torch.testing.assert_close(store.layer(1), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def test_all_work_is_compaction_work_and_the_cache_stays():
    engine, cache = prefilled()
    before = engine.next_token_logits(cache.fork(), [5, 6])
    known = (engine.counters.prefilled_tokens, engine.counters.decoded_tokens)
    turns, _ = reference_turns(engine, cache, 4, seed=0, answer_tokens=6)
    engine.counters.prefilled_tokens, engine.counters.decoded_tokens = known
    store = self_study_queries(engine, cache, 0, 40, 0, study=Study(prompts=4, answer_tokens=6))
    assert (engine.counters.prefilled_tokens, engine.counters.decoded_tokens) == known
    captured = len(store)
    assert captured == sum(map(len, turns))
    assert captured * 2 <= engine.counters.compaction_tokens <= captured * 2 + len(turns)  # and the end tokens
    assert cache.next_position == len(cache.token_ids) == 40
    assert not cache.is_compacted
    torch.testing.assert_close(engine.next_token_logits(cache.fork(), [5, 6]), before)


def test_counters_are_put_right_after_an_error(monkeypatch):
    engine, cache = prefilled()
    known = (engine.counters.prefilled_tokens, engine.counters.decoded_tokens)

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "decode_batch", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        self_study_queries(engine, cache, 0, 40, 0, study=Study(prompts=4, answer_tokens=6))
    assert (engine.counters.prefilled_tokens, engine.counters.decoded_tokens) == known
    assert engine.counters.compaction_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_same_seed_same_queries(temperature):
    engine, cache = prefilled()
    options = {"prompts": 4, "answer_tokens": 6, "temperature": temperature}
    first, again, other = (self_study_queries(engine, cache, 0, 40, seed, study=Study(**options)) for seed in (1, 1, 2))
    assert torch.equal(first.layer(0), again.layer(0))
    assert first.layer(0).shape != other.layer(0).shape or not torch.equal(first.layer(0), other.layer(0))
    assert len(self_study_queries(engine, cache, 0, 40, 2**63 - 1, study=Study(**options))) > 0


def test_a_compacted_cache_can_study_itself():
    engine = TransformersEngine(tiny_model("llama"))
    small = compact(engine, tiny_text(60), ratio=4)
    entries = small.entries
    store = self_study_queries(engine, small, 0, 60, 0, study=Study(prompts=4, answer_tokens=5))
    assert torch.isfinite(store.layer(0)).all()
    assert small.entries == entries
    assert small.next_position == 60


def test_progress_is_told():
    engine, cache = prefilled(batch_size=2)
    told = []
    self_study_queries(
        engine, cache, 0, 40, 0, lambda *what: told.append(what), study=Study(prompts=4, answer_tokens=3)
    )
    assert told[:2] == [("self-study", 2, 4), ("self-study", 4, 4)]
    assert told[-1][0] == "reference queries"
    assert told[-1][1] == told[-1][2]


def test_without_room_it_is_refused_with_numbers():
    engine, cache = prefilled(tokens=480)
    with pytest.raises(ContextLengthError, match=r"behind the 480 .* 512: use queries=context_prefill"):
        self_study_queries(engine, cache, 0, 480, 0, study=Study(answer_tokens=30))


def test_no_prompts_are_refused():
    engine, cache = prefilled()
    with pytest.raises(SettingsError, match="one prompt"):
        self_study_queries(engine, cache, 0, 40, 0, study=Study(prompts=0))


def test_an_engine_that_captures_nothing_is_refused():
    engine, cache = prefilled()
    engine.capabilities = frozenset()
    with pytest.raises(CapabilityError, match="self-study"):
        self_study_queries(engine, cache, 0, 40, 0)


def test_prompts_alternate_and_take_turns():
    chosen = study_prompts(24, seed=0)
    assert [prompt.asks for prompt in chosen] == [False, True] * 12
    kinds = [next(kind for kind, texts in STATEMENTS.items() if prompt.text in texts) for prompt in chosen[::2]]
    assert kinds == list(STATEMENTS) * 4
    openings = dict(zip(STATEMENTS, STATEMENT_OPENINGS, strict=True))
    assert [prompt.opening for prompt in chosen[::2]] == [openings[kind] for kind in kinds]
    assert len({prompt.text for prompt in chosen[::2]}) == 12
    assert {prompt.text for prompt in chosen[1::2]} == set(QUESTIONS)
    assert len(set(study_prompts(80, seed=0)[1::2])) == 40
    assert study_prompts(24, seed=0) == chosen != study_prompts(24, seed=1)


def test_a_focus_is_asked_about_as_it_is_written():
    chosen = study_prompts(16, 0, " the {focus} of {0} % harbours ")
    about = [prompt for prompt in chosen if "the {focus} of {0} % harbours" in prompt.text]
    assert [prompt.asks for prompt in about] == [False, True] * 4
    assert not any(prompt.text.endswith(" ") for prompt in about)
    assert {prompt.opening for prompt in about if not prompt.asks} == {STATEMENT_OPENINGS[0]}
    assert study_prompts(8, 0, " ") == study_prompts(8, 0)


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (" is the harbour? It is", "What is the harbour?"),
        (" is it", "What is it"),
        (" is\nit? And", "What is"),
        ("", "What"),
    ],
)
def test_the_question_is_cut_out_of_the_answer(answer, question):
    assert _question(StudyPrompt("Ask.", "What", True), answer) == question


def test_greedy_requests_are_made_once():
    engine, cache = prefilled()
    told = []
    self_study_queries(
        engine, cache, 0, 40, 0, lambda *what: told.append(what), study=Study(prompts=120, answer_tokens=2)
    )
    assert told[0][2] == 12 + 40


def test_a_focus_changes_the_queries():
    engine, cache = prefilled()
    plain, about = (
        self_study_queries(engine, cache, 0, 40, 0, study=Study(focus=focus, prompts=4, answer_tokens=3))
        for focus in (None, "w9 w10 w11")
    )
    assert len(about) != len(plain) or not torch.equal(about.layer(0), plain.layer(0))


def test_kinds_are_joined_one_behind_the_other():
    engine, cache = prefilled(tokens=60)
    kinds = ("context_prefill", "repeat_prefill", "self_study")
    options = {"prompts": 2, "answer_tokens": 4}
    joined = reference_queries(kinds, engine, cache, 10, 50, 3, study=Study(**options))
    for layer in (0, 1):
        parts = [
            context_prefill_queries(engine, cache, 10, 50, 3).layer(layer, 10, 50),
            repeat_prefill_queries(engine, cache, 10, 50, 3).layer(layer),
            self_study_queries(engine, cache, 10, 50, 3, study=Study(**options)).layer(layer),
        ]
        assert parts[0].shape[1] == 40
        torch.testing.assert_close(joined.layer(layer), torch.cat(parts, dim=1))
    alone = reference_queries(["context_prefill"], engine, cache, 10, 50, 3)
    assert torch.equal(alone.layer(1), cache.captured.layer(1, 10, 50))


def test_joined_queries_keep_to_the_bound():
    each = 2 * 4 * 16 * 4
    engine, cache = prefilled(tokens=60, capture_bytes=50 * each)
    kinds = ("context_prefill", "repeat_prefill", "context_prefill")
    joined = [reference_queries(kinds, engine, cache, 0, 60, 3) for _ in range(2)]
    taken = joined[0].layer(0)
    assert 48 <= taken.shape[1] <= 50
    assert torch.equal(taken, joined[1].layer(0))
    assert joined[0].layer(1).shape == taken.shape
    whole = context_prefill_queries(engine, cache, 0, 60, 3)
    rows = [
        [int((whole.layer(index) == query[:, None]).all(dim=2).all(dim=0).nonzero()) for query in layer.unbind(1)]
        for index, layer in enumerate((taken[:, :20], joined[0].layer(1)[:, :20]))
    ]
    assert rows[0] == rows[1] == sorted(set(rows[0]))  # the same positions in both layers


def test_kinds_that_do_not_exist_and_none_are_refused():
    engine, cache = prefilled()
    with pytest.raises(SettingsError, match="did you mean 'self_study'"):
        reference_queries(["selfstudy"], engine, cache, 0, 40, 0)
    with pytest.raises(SettingsError, match="one or more of"):
        reference_queries([], engine, cache, 0, 40, 0)


def test_a_bound_below_one_position_of_each_kind_is_said():
    engine, cache = prefilled(capture_bytes=2 * 4 * 16 * 4)
    with pytest.raises(CacheError, match="capture_bytes"):
        reference_queries(
            ["repeat_prefill", "self_study"], engine, cache, 0, 40, 0, study=Study(prompts=2, answer_tokens=3)
        )
