"""The strategy `summary`: what it asks, what it keeps, what it refuses."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import (
    CompactedCache,
    CompactionRequest,
    Generation,
    PromptFormat,
    TransformersEngine,
    answer,
    compact,
    make_strategy,
    recompact,
)
from agentcompact.errors import AgentCompactError, BudgetError, CacheError, ContextLengthError, SettingsError
from agentcompact.strategies.summary_prompts import framed, summary_request, until_stop

UNKNOWN = 2
INTRODUCTION = [UNKNOWN] * len(framed("", follows=False, goes_on=False).split())
IDS = tiny_tokens(100)
BUDGET = 40
ROOM = BUDGET - len(INTRODUCTION)


class ScriptedEngine(TransformersEngine):
    """Reads what it is asked, and answers from a script of (token ids, finish reason)."""

    def __init__(self, model, *script):
        super().__init__(model)
        self.script = list(script)
        self.asked = []
        self.encoded = []

    def encode(self, text, *, control_tokens=False):
        self.encoded.append(text)
        return super().encode(text, control_tokens=control_tokens)

    def decode(self, cache, prompts, sampling, on_token=None):
        self.asked.append(SimpleNamespace(position=cache.next_position, prompt=list(prompts[0]), sampling=sampling))
        self.read_prompts(cache, prompts, sampling.max_new_tokens)
        ids, reason = self.script.pop(0)
        self.counters.decoded_tokens += len(ids)
        for token in ids if on_token else ():
            on_token(0, token)
        return [Generation(self.decode_text(ids), list(ids), reason)]

    @property
    def requests(self):
        """The texts of the questions asked."""
        return [text for text in self.encoded if "Write at most" in text]


@pytest.fixture(scope="module")
def models():
    return {kind: tiny_model(kind) for kind in ("llama", "gemma3")}


@pytest.fixture
def model(models):
    return models["llama"]


def logits_behind(engine, cache):
    return engine.next_token_logits(cache.fork(), tiny_tokens(4, seed=9))


def assert_reads_as(engine, cache, ids):
    """The cache is the one of a plain prefill of these tokens."""
    assert cache.token_ids == ids
    assert cache.next_position == cache.held_positions == len(ids)
    torch.testing.assert_close(
        logits_behind(engine, cache), logits_behind(engine, engine.prefill(ids)), rtol=1e-4, atol=1e-4
    )


def test_a_complete_summary_takes_the_place_of_the_text(model):
    words = tiny_tokens(10, seed=1)
    engine = ScriptedEngine(model, (words, "eos"))
    cache = engine.prefill(IDS, capture_seed=0)
    cache.metadata.document = "a book"
    new = recompact(engine, cache, "summary", budget=BUDGET)
    assert_reads_as(engine, new, INTRODUCTION + words)
    assert not new.is_compacted
    assert new.captured is None
    report = new.metadata.reports[-1]
    assert (report.strategy, report.tokens, report.budget) == ("summary", 100, BUDGET)
    assert report.summary == tiny_text(10, seed=1)
    assert (report.entries_before, report.entries_after) == (4 * 100, 4 * 15)
    assert new.entries == 4 * 15
    assert report.bytes_after * 100 == report.bytes_before * 15
    assert set(report.seconds) == {"summarise", "prefill", "total"}
    assert report.settings == {"instructions": None, "attempts": 2, "temperature": 0.0}
    assert report.warnings == []
    assert (new.metadata.document, new.metadata.prompt) == ("a book", cache.metadata.prompt)
    assert new.metadata.prefill_seconds == cache.metadata.prefill_seconds


def test_the_text_is_not_read_again_and_all_work_counts_as_compaction(model):
    engine = ScriptedEngine(model, (tiny_tokens(10, seed=1), "eos"))
    cache = engine.prefill(IDS)
    counted = copy.copy(engine.counters)
    new = recompact(engine, cache, "summary", budget=BUDGET)
    (asked,) = engine.asked
    assert asked.position == 100
    assert asked.prompt[:1] == [UNKNOWN]  # the question alone
    assert engine.counters.prefilled_tokens == counted.prefilled_tokens == 100
    assert engine.counters.decoded_tokens == counted.decoded_tokens == 0
    assert engine.counters.compaction_tokens == len(asked.prompt) + 10 + 15
    assert new.metadata.reports[-1].compaction_tokens == engine.counters.compaction_tokens


def test_a_summary_that_was_cut_is_continued_and_joined(model):
    first, second, third = tiny_tokens(26, seed=1), tiny_tokens(6, seed=2), tiny_tokens(2, seed=3)
    engine = ScriptedEngine(model, (first, "length"), (second, "length"), (third, "eos"))
    new = recompact(engine, engine.prefill(IDS), "summary", budget=BUDGET)
    assert_reads_as(engine, new, INTRODUCTION + first + second + third)
    caps = [asked.sampling.max_new_tokens for asked in engine.asked]
    assert caps == [ROOM * 3 // 4, (ROOM - 26) * 3 // 4, ROOM - 32] == [26, 6, 3]
    assert engine.asked[1].prompt[-26:] == first
    assert engine.asked[2].prompt[-32:] == first + second
    assert "come to an end" not in engine.requests[1]
    assert "come to an end within 4 more words" in engine.requests[-2]
    assert {asked.position for asked in engine.asked} == {100}


@pytest.mark.parametrize(
    "script",
    [
        [(tiny_tokens(26), "length"), (tiny_tokens(6), "length"), (tiny_tokens(3), "length")],
        [(tiny_tokens(26), "length"), ([], "eos")],
        [([], "eos")],
        [([0, 0, 1], "eos")],
    ],
    ids=["never ends", "ends at once when continued", "empty", "control tokens only"],
)
def test_what_is_kept_and_what_is_refused(model, script):
    engine = ScriptedEngine(model, *script)
    cache = engine.prefill(IDS, capture_seed=0)
    known = (cache.nbytes, cache.next_position, list(cache.token_ids), cache.captured)
    before, counted = logits_behind(engine, cache), engine.counters.prefilled_tokens
    if len(script) == 2:
        new = recompact(engine, cache, "summary", budget=BUDGET)
        assert new.token_ids == INTRODUCTION + script[0][0]
    else:
        message = "did not end within its 35 tokens" if len(script) == 3 else "empty summary"
        with pytest.raises(CacheError, match=message):
            recompact(engine, cache, "summary", budget=BUDGET)
    assert (cache.nbytes, cache.next_position, cache.token_ids, cache.captured) == known
    assert cache.metadata.reports == []
    assert torch.equal(logits_behind(engine, cache), before)
    assert engine.counters.prefilled_tokens == counted  # failed work is compaction work too
    assert engine.counters.compaction_tokens > 0


def test_without_attempts_one_try_has_all_the_room(model):
    engine = ScriptedEngine(model, (tiny_tokens(ROOM), "length"))
    with pytest.raises(CacheError, match="larger budget"):
        recompact(engine, engine.prefill(IDS), "summary", budget=BUDGET, attempts=0)
    (asked,) = engine.asked
    assert asked.sampling.max_new_tokens == ROOM
    assert "at most 24 words" in engine.requests[0]


def test_the_request_says_what_to_keep_in_which_language_and_length(model):
    engine = ScriptedEngine(model, (tiny_tokens(5), "eos"), (tiny_tokens(5), "eos"))
    cache = engine.prefill(IDS)
    cache.metadata.prompt = PromptFormat(before_question="\nQ: ", after_question="\nA:", stop=("\n\n", "\nQ:"))
    recompact(engine, cache, "summary", budget=BUDGET, focus=" ports ", seed=-1)
    asked = engine.requests[-1]
    assert asked.startswith("\nQ: Summarise the whole text above")
    for wish in ("file paths", "commands", "numbers", "decisions", "corrected", "the language of the text", "preamble"):
        assert wish in asked
    assert asked.endswith("Pay most attention to this: ports Write at most 18 words.")
    assert "\nA:" in engine.encoded
    assert engine.asked[0].sampling.stop == ("\nQ:",)  # an empty line may part two paragraphs
    recompact(engine, cache, "summary", budget=BUDGET, instructions=" Only ports. ", temperature=0.5)
    assert engine.requests[-1] == "\nQ: Only ports. Write at most 18 words."
    assert engine.asked[1].sampling.temperature == 0.5


@pytest.mark.parametrize(
    "wrong", [{"instructions": " "}, {"attempts": -1}, {"temperature": -1}, {"length": 3}], ids=str
)
def test_settings_that_do_not_exist(wrong):
    with pytest.raises(SettingsError, match="summary"):
        make_strategy("summary", **wrong)


def test_texts_around_a_summary():
    assert summary_request("Do.", 7, "ports.", " w1 w2 ") == (
        'Do. Begin at "w1 w2"; what comes before that stays as it is. Pay most attention to this: ports. '
        "Write at most 7 words."
    )
    assert framed("It rained.", follows=True, goes_on=True).startswith("\nSummary")
    assert framed("It rained.", follows=True, goes_on=True).endswith(":\nIt rained.\n\n")
    assert until_stop("\nQ: one\nQ: two", ["\nQ:"]) == ("\nQ: one", True)
    assert until_stop("one\nA: x\nQ: two", ["\nQ:", "\nA:"]) == ("one", True)
    assert until_stop("one", ["\nQ:"]) == ("one", False)


def test_a_stop_string_ends_a_summary_at_its_place(model, monkeypatch):
    engine = ScriptedEngine(model, (tiny_tokens(6), "stop"))
    cache = engine.prefill(IDS)
    monkeypatch.setattr(engine, "decode_text", lambda _: "w5 w6\nQuestion: w7")
    new = recompact(engine, cache, "summary", budget=BUDGET)
    assert new.token_ids == [*INTRODUCTION, 5, 6]


def test_a_text_that_grows_when_it_is_encoded_is_refused(model, monkeypatch):
    engine = ScriptedEngine(model, (tiny_tokens(26), "eos"))
    cache = engine.prefill(IDS)
    monkeypatch.setattr(engine, "decode_text", lambda _: "w5 " * (ROOM + 1))
    with pytest.raises(CacheError, match="did not end"):
        recompact(engine, cache, "summary", budget=BUDGET)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(("start", "stop"), [(0, 60), (4, 60), (4, 100), (59, 100), (0, 97)])
def test_text_before_and_after_the_span_stays_word_for_word(models, kind, start, stop):
    words = tiny_tokens(10, seed=1)
    engine = ScriptedEngine(models[kind], (words, "eos"))
    cache = engine.prefill(IDS)
    new = recompact(engine, cache, "summary", budget=BUDGET, start=start, stop=stop)
    assert_reads_as(engine, new, IDS[:start] + INTRODUCTION + words + IDS[stop:])
    report = new.metadata.reports[-1]
    assert (report.tokens, report.entries_after) == (stop - start, 2 * len(new.full_layers) * 15)
    went_back = kind == "llama" or stop == 100
    assert engine.asked[0].position == (stop if went_back else 100)
    assert [("sliding-window" in warning) for warning in report.warnings] == ([] if went_back else [True])
    opening = engine.decode_text(IDS[start : start + 8])
    assert (f'Begin at "{opening}"' in engine.requests[-1]) == (start > 0)
    assert new.nbytes <= 2 * engine.prefill(new.token_ids).nbytes + 4 * 80 * 128  # spare room of a tail, no old text


def test_what_comes_before_a_document_in_its_template_stays(model):
    words = tiny_tokens(10, seed=1)
    engine = ScriptedEngine(model, (words, "eos"), (words, "eos"), (words, "eos"))
    form = PromptFormat(kind="chat", prefix="<s> w7", before_question="\n\n", after_question=" w8", stop=())
    cache = engine.prefill([0, 7, *IDS])
    cache.metadata.prompt = form
    for start in (0, 2):
        new = recompact(engine, cache, "summary", budget=BUDGET, start=start)
        assert_reads_as(engine, new, [0, 7, *INTRODUCTION, *words])
        assert new.metadata.prompt == form
        assert engine.asked[-1].prompt[-1] == 8
        assert "Begin at" not in engine.requests[-1]  # nothing but the template's own text is before it
    other = engine.prefill(IDS)
    other.metadata.prompt = form
    assert recompact(engine, other, "summary", budget=BUDGET).token_ids == INTRODUCTION + words


@pytest.mark.parametrize("name", ["two_pass", "streaming_llm", "high_attn"])
def test_a_cache_that_was_compacted_before(model, name):
    words = tiny_tokens(10, seed=1)
    engine = ScriptedEngine(model, (words, "eos"))
    cache = recompact(engine, engine.prefill(IDS, capture_seed=0), name, budget=30, stop=60)
    new = recompact(engine, cache, "summary", budget=BUDGET, stop=90)
    assert_reads_as(engine, new, INTRODUCTION + words + IDS[90:])
    assert [report.strategy for report in new.metadata.reports] == [name, "summary"]
    assert new.metadata.reports[-1].entries_before == 4 * 60
    assert cache.is_compacted
    assert len(cache.metadata.reports) == 1


@pytest.mark.parametrize("start", [60, 70, 2])
def test_entries_before_the_span_stay_compacted(model, start):
    words = tiny_tokens(10, seed=1)
    engine = ScriptedEngine(model, (words, "eos"))
    cache = recompact(engine, engine.prefill(IDS, capture_seed=0), "streaming_llm", budget=30, stop=60)
    new = recompact(engine, cache, "summary", budget=25, start=start)
    before = cache.fork() if start >= 60 else engine.prefill(IDS[:2])  # the sinks are whole
    if start >= 60:
        before.truncate(start)
    expected = engine.prefill(INTRODUCTION + words, before)
    assert new.token_ids == IDS[:start] + INTRODUCTION + words
    assert new.next_position == start + 15
    torch.testing.assert_close(logits_behind(engine, new), logits_behind(engine, expected), rtol=1e-4, atol=1e-4)
    assert new.entries == expected.entries
    assert new.metadata.reports[-1].entries_after == 4 * 15


def test_a_start_that_cannot_be_taken_out_of_a_compacted_span(models):
    engine = ScriptedEngine(models["llama"], *[(tiny_tokens(10), "eos")] * 2)
    kept = recompact(engine, engine.prefill(IDS), "streaming_llm", budget=30, stop=60, sinks=0)
    with pytest.raises(CacheError, match="nothing|kept apart"):
        recompact(engine, kept, "summary", budget=25, start=20)
    engine = ScriptedEngine(models["gemma3"], *[(tiny_tokens(10), "eos")] * 2)
    kept = recompact(engine, engine.prefill(IDS), "streaming_llm", budget=30, stop=60)
    with pytest.raises(CacheError, match="sliding|kept apart"):
        recompact(engine, kept, "summary", budget=25, start=2)
    assert recompact(engine, kept, "summary", budget=25).next_position == 15


def test_a_summary_is_summarised_again_and_compacted_by_others(model):
    engine = ScriptedEngine(model, (tiny_tokens(30, seed=1), "eos"), (tiny_tokens(8, seed=2), "eos"))
    first = recompact(engine, engine.prefill(IDS), "summary", budget=60)
    second = recompact(engine, first, "summary", budget=25)
    assert second.token_ids == INTRODUCTION + tiny_tokens(8, seed=2)
    third = recompact(engine, second, "two_pass", ratio=2)
    assert (third.next_position, third.held_positions) == (13, 7)
    assert [report.strategy for report in third.metadata.reports] == ["summary", "summary", "two_pass"]


def test_a_budget_that_holds_everything_changes_nothing(model):
    engine = ScriptedEngine(model)
    cache = engine.prefill(IDS)
    new = recompact(engine, cache, "summary", budget=100)
    assert new.token_ids == IDS
    report = new.metadata.reports[-1]
    assert "nothing was compacted" in report.warnings[0]
    assert (report.summary, report.compaction_tokens) == ("", 0)


def test_a_budget_below_the_surrounding_text_says_what_is_needed(model):
    engine = ScriptedEngine(model, (tiny_tokens(10), "eos"))
    cache = engine.prefill(IDS)
    needed = len(INTRODUCTION) + 16
    with pytest.raises(BudgetError, match=f"give {needed} or more"):
        recompact(engine, cache, "summary", budget=needed - 1)
    assert engine.asked == []
    assert recompact(engine, cache, "summary", budget=needed).held_positions == 15


def test_a_cache_whose_token_ids_are_not_known(model):
    engine = ScriptedEngine(model)
    cache = engine.prefill(IDS)
    cache.token_ids = []
    with pytest.raises(CacheError, match="token ids"):
        recompact(engine, cache, "summary", budget=BUDGET)


def test_the_request_needs_room_behind_the_text(model):
    engine = ScriptedEngine(model, (tiny_tokens(10), "eos"))
    with pytest.raises(ContextLengthError, match=r"context of 512: compact earlier"):
        recompact(engine, engine.prefill(tiny_tokens(500)), "summary", budget=100)
    probe = ScriptedEngine(model, (tiny_tokens(10), "eos"))
    recompact(probe, probe.prefill(IDS), "summary", budget=BUDGET)
    length = 512 - len(probe.asked[0].prompt) - 60
    new = recompact(engine, engine.prefill(tiny_tokens(length)), "summary", budget=200)
    assert new.next_position == 15
    (asked,) = engine.asked
    assert "the model's context leaves" in new.metadata.reports[-1].warnings[0]
    assert asked.position + len(asked.prompt) + asked.sampling.max_new_tokens <= 512
    assert asked.sampling.max_new_tokens < 60 * 3 // 4
    assert "at most 21 words" in engine.requests[-1]


def test_a_saved_cache_answers_as_before(model, tmp_path):
    engine = ScriptedEngine(model, (tiny_tokens(10, seed=1), "eos"))
    cache = engine.prefill(IDS)
    new = recompact(engine, cache, "summary", budget=BUDGET, start=4, stop=90)
    loaded = CompactedCache.load(new.save(tmp_path / "a.kv"), model)
    assert loaded.token_ids == new.token_ids
    assert loaded.metadata.reports[-1].summary == tiny_text(10, seed=1)
    plain = TransformersEngine(model)
    question = tiny_text(3, seed=4)
    texts = [answer(plain, each, question, max_new_tokens=5)[0].text for each in (new, loaded)]
    assert texts[0] == texts[1]
    assert torch.equal(logits_behind(plain, loaded), logits_behind(plain, new))


def test_progress_and_a_real_decode(model):
    """A random model seldom ends: either way, nothing half is kept and the counters say what was done."""
    engine, told = TransformersEngine(model), []
    cache = engine.prefill(IDS)
    request = CompactionRequest(engine, cache, BUDGET, progress=lambda *said: told.append(said))
    try:
        new = make_strategy("summary").compact(request).cache
        assert new.next_position <= BUDGET
    except CacheError as error:
        assert "did not end" in str(error)
    written = [said for said in told if said[0] == "summary: writing"]
    assert written[0] == ("summary: writing", 1, ROOM)
    assert [count for _, count, _ in written] == list(range(1, len(written) + 1))
    assert (engine.counters.prefilled_tokens, engine.counters.decoded_tokens) == (100, 0)
    assert cache.next_position == 100


def test_the_embedded_model_on_the_demo_document(smollm2, document):
    engine = TransformersEngine(smollm2)
    try:
        cache = compact(engine, document, "summary", budget=200, attempts=1)
    except AgentCompactError as error:
        assert isinstance(error, CacheError)
        assert "did not end" in str(error)
        return
    assert cache.next_position == cache.held_positions <= 200
    assert cache.metadata.reports[-1].summary.strip() in engine.decode_text(cache.token_ids)
    (made,) = answer(engine, cache, "Who was sent to look at the harbour accounts?", max_new_tokens=12)
    assert made.token_ids
