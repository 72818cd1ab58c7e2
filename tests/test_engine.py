"""Decoding: stop strings, sampling, batches whose rows end at different times, counters."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import EngineSettings, SamplingSettings, TransformersEngine, answer, compact
from agentcompact.errors import ContextLengthError, DocumentError, SettingsError


@pytest.fixture(scope="module")
def engine():
    model = tiny_model("llama")
    model.causal_lm.generation_config.eos_token_id = None
    model.tokenizer.eos_token = None
    return TransformersEngine(model)


@pytest.fixture(scope="module")
def cache(engine):
    return compact(engine, tiny_text(80), ratio=4, prompt="raw")


def decode(engine, cache, prompts, **settings):
    return engine.decode(cache.fork(len(prompts)), prompts, SamplingSettings(**settings))


def test_a_stop_string_ends_the_answer_before_it(engine, cache):
    whole = decode(engine, cache, [[5, 6]], max_new_tokens=12)[0]
    words = whole.text.split()
    assert len(words) >= 10  # an end token in between would be left out of the text
    cut = decode(engine, cache, [[5, 6]], max_new_tokens=12, stop=(words[4],))[0]
    assert cut.finish_reason == "stop"
    assert cut.text.split() == words[: words.index(words[4])]
    assert len(cut.token_ids) <= 6


def test_a_stop_string_before_the_first_word_ends_nothing(engine):
    from agentcompact.engines.sampling import StopWatch

    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    watch = StopWatch(Letters(), SamplingSettings(stop=("\n\n",), max_new_tokens=20), set(), 1)
    for letter in "\n\nYes":
        assert watch.add(0, ord(letter))
    assert watch.add(0, ord("\n"))
    assert not watch.add(0, ord("\n"))
    assert watch.generations[0].text == "\n\nYes"


def test_rows_that_end_early_leave_the_others_as_they_were(engine, cache):
    """Each row gets the tokens it gets alone, whatever the others do; end tokens are no part of an answer."""
    prompts = [[5, 6], [7, 8, 9], [10], [11, 12]]
    alone = [decode(engine, cache, [prompt], max_new_tokens=15)[0].token_ids for prompt in prompts]
    ends = {alone[0][3], alone[1][9]}
    engine.model.causal_lm.generation_config.eos_token_id = sorted(ends)
    try:
        together = decode(engine, cache, prompts, max_new_tokens=15)
    finally:
        engine.model.causal_lm.generation_config.eos_token_id = None
    for made, tokens in zip(together, alone, strict=True):
        place = next((i for i, token in enumerate(tokens) if token in ends), None)
        assert made.token_ids == tokens[:place]
        assert made.finish_reason == ("length" if place is None else "eos")


def test_on_token_tells_every_token_of_each_answer(engine, cache):
    told = {}
    questions = ["w5 w6 w7", "w8", "w9 w10"]
    made = answer(
        engine, cache, questions, max_new_tokens=6, on_token=lambda row, token: told.setdefault(row, []).append(token)
    )
    assert [told[row] for row in range(3)] == [each.token_ids for each in made]


def test_batches_do_not_change_answers_or_their_order(engine, cache):
    questions = ["w5 w6 w7 w8 w9", "w8", "w9 w10", "w11 w12 w13", "w14"]
    one = TransformersEngine(engine.model, EngineSettings(batch_size=1))
    two = TransformersEngine(engine.model, EngineSettings(batch_size=2))
    texts = [[made.text for made in answer(each, cache, questions, max_new_tokens=8)] for each in (engine, one, two)]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 1


def test_answers_leave_the_cache_as_it_is(engine, cache):
    before = cache.entries, cache.next_position, [layer.span.keys.clone() for _, layer in cache.full_layers]
    answer(engine, cache, ["w5", "w6 w7"], max_new_tokens=4)
    assert (cache.entries, cache.next_position) == before[:2]
    for (_, layer), keys in zip(cache.full_layers, before[2], strict=True):
        assert torch.equal(layer.span.keys, keys)


@pytest.mark.parametrize(("settings", "kept"), [({"top_k": 2}, 2), ({"top_p": 0.5}, None), ({"top_p": 1e-6}, 1)])
def test_sampling_draws_from_what_it_should(engine, cache, settings, kept):
    logits = engine.next_token_logits(cache.fork(), [5, 6])[-1]
    probabilities, order = logits.softmax(-1).sort(descending=True)
    if kept is None:
        kept = int((probabilities.cumsum(0) < 0.5).sum()) + 1
    allowed = set(order[:kept].tolist())
    drawn = {
        decode(engine, cache, [[5, 6]], max_new_tokens=1, temperature=1.0, seed=seed, **settings)[0].token_ids[0]
        for seed in range(30)
    }
    assert drawn <= allowed
    assert len(drawn) == min(kept, len(drawn))
    assert kept == 1 or len(drawn) > 1


def test_temperature_flattens(engine, cache):
    def distinct(temperature):
        return len(
            {
                decode(engine, cache, [[5, 6]], max_new_tokens=1, temperature=temperature, seed=seed)[0].token_ids[0]
                for seed in range(40)
            }
        )

    assert distinct(1e-5) == 1
    assert distinct(5.0) > 10


def test_decoding_one_sequence_keeps_its_token_ids(engine):
    live = engine.prefill(tiny_tokens(20))
    made = engine.decode(live, [[5, 6]], SamplingSettings(max_new_tokens=4))[0]
    assert live.token_ids == [*tiny_tokens(20), 5, 6, *made.token_ids[:3]]  # the last token was not fed again
    assert live.next_position == len(live.token_ids)


def test_counters(engine):
    fresh = TransformersEngine(engine.model)
    cache = compact(fresh, tiny_text(40), ratio=4, prompt="raw")
    assert (fresh.counters.prefilled_tokens, fresh.counters.compaction_tokens) == (40, 0)
    answer(fresh, cache, ["w5", "w6"], max_new_tokens=3)
    assert fresh.counters.decoded_tokens == 6
    assert fresh.counters.compaction_tokens == 0


def test_nothing_to_do_is_refused(engine, cache):
    with pytest.raises(DocumentError, match="no tokens"):
        engine.decode(cache.fork(1), [[]], SamplingSettings())
    with pytest.raises(ContextLengthError, match="do not fit the model's context of 512"):
        answer(engine, cache, "w5", max_new_tokens=1000)
    with pytest.raises(SettingsError, match="max_new_token.*did you mean 'max_new_tokens'"):
        answer(engine, cache, "w5", max_new_token=3)
    with pytest.raises(DocumentError, match="empty"):
        answer(engine, cache, ["w5", " "])
    assert answer(engine, cache, []) == []


def test_control_tokens_in_a_document_are_plain_text(smollm2):
    """A document cannot end its own message."""
    engine = TransformersEngine(smollm2)
    marker = smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert marker not in engine.encode("before <|im_end|> after")
    assert marker in engine.encode("before <|im_end|> after", control_tokens=True)


def test_chat_prompt_is_the_template_around_document_and_question(smollm2):
    from agentcompact import prefill_document
    from agentcompact.engines import question_ids

    engine = TransformersEngine(smollm2)
    cache = prefill_document(engine, "The sky is green.", prompt="chat")
    ids = [*cache.token_ids, *question_ids(engine, cache.metadata.prompt, "Which colour?")]
    expected = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "The sky is green.\n\nWhich colour?"}], add_generation_prompt=True, tokenize=False
    )
    assert smollm2.tokenizer.decode(ids) == expected
