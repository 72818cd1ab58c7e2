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
    return compact(engine, tiny_text(80), "two_pass", ratio=4, prompt="raw")


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
    cache = compact(fresh, tiny_text(40), "two_pass", ratio=4, prompt="raw")
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


class Interrupting:
    """Raises KeyboardInterrupt in the second layer's attention, after the first layer has taken its entries."""

    def __init__(self, model, after=0):
        self.module = model.causal_lm.model.layers[1].self_attn
        self.left = after

    def __enter__(self):
        self.handle = self.module.register_forward_pre_hook(self.stop)

    def stop(self, *_):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def __exit__(self, *_):
        self.handle.remove()


def test_a_pass_interrupted_between_layers_leaves_the_cache_usable():
    fresh = TransformersEngine(tiny_model("llama"), EngineSettings(prefill_chunk=8))
    cache = fresh.prefill(tiny_tokens(20), capture_seed=0)
    plain = fresh.next_token_logits(cache.fork(), [5, 6, 7])
    stored = cache.captured.layer(1).clone()
    attempts = [
        (0, lambda: fresh.prefill(tiny_tokens(30, seed=2), cache, capture_seed=0), 20),
        (2, lambda: fresh.prefill(tiny_tokens(30, seed=2), cache, capture_seed=0), 20),
        (0, lambda: fresh.next_token_logits(cache, [9, 10]), 20),
        (0, lambda: fresh.decode(cache, [[5, 6]], SamplingSettings(max_new_tokens=9)), 20),
    ]
    for after, work, position in attempts:
        with Interrupting(fresh.model, after), pytest.raises(KeyboardInterrupt):
            work()
        assert [layer.get_seq_length() for layer in cache.layers] == [position, position]
        assert cache.token_ids == tiny_tokens(20)
        assert torch.equal(cache.captured.layer(1), stored)
        assert sorted(cache.captured.positions.tolist()) == list(range(20))
    assert torch.allclose(fresh.next_token_logits(cache.fork(), [5, 6, 7]), plain, atol=1e-5)
    again = fresh.prefill(tiny_tokens(30, seed=2), cache, capture_seed=0)
    assert sorted(again.captured.positions.tolist()) == list(range(50))


def test_an_interrupted_prefill_gives_back_what_a_full_store_evicted():
    few = TransformersEngine(tiny_model("llama"), EngineSettings(prefill_chunk=8, capture_bytes=10 * 2 * 4 * 16 * 4))
    cache = few.prefill(tiny_tokens(20), capture_seed=0)
    before, stored = cache.captured.positions.clone(), cache.captured.layer(0).clone()
    with Interrupting(few.model, after=2), pytest.raises(KeyboardInterrupt):
        few.prefill(tiny_tokens(40, seed=2), cache, capture_seed=0)
    assert torch.equal(cache.captured.positions, before)
    assert torch.equal(cache.captured.layer(0), stored)


def test_decoding_interrupted_later_keeps_the_whole_steps():
    fresh = TransformersEngine(tiny_model("llama"))
    fresh.model.causal_lm.generation_config.eos_token_id = None
    cache = fresh.prefill(tiny_tokens(20))
    with Interrupting(fresh.model, after=3), pytest.raises(KeyboardInterrupt):
        fresh.decode(cache, [[5, 6]], SamplingSettings(max_new_tokens=9))
    assert [layer.get_seq_length() for layer in cache.layers] == [24, 24]
    assert len(cache.token_ids) == 24
    whole = fresh.prefill(cache.token_ids)
    expected = fresh.next_token_logits(whole, [7])
    assert torch.allclose(fresh.next_token_logits(cache, [7]), expected, atol=1e-4)


def test_forks_appended_to_in_two_threads_stay_apart():
    """Both want the place behind the shared tail; one of them must copy."""
    import threading

    from agentcompact.cache.tail import TailBuffer

    for _ in range(300):
        rows = torch.zeros(1, 1, 4, 2)
        shared = TailBuffer.empty(rows, rows, 64).append(0, rows, rows, 0)
        shared.shared = True
        made, gate = {}, threading.Barrier(2)

        def append(value, shared=shared, made=made, gate=gate):
            new = torch.full((1, 1, 3, 2), float(value))
            gate.wait()
            made[value] = shared.append(4, new, new, 0)

        threads = [threading.Thread(target=append, args=(value,)) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made[1] is not made[2]
        for value, buffer in made.items():
            assert (buffer.keys[:, :, 4:7] == value).all()


def test_reading_the_beginning_does_not_change_how_documents_are_read(smollm2):
    engine = TransformersEngine(smollm2)
    marker = smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert marker in smollm2.tokenizer("<|im_end|>")["input_ids"]
    assert marker not in engine.encode("<|im_end|>")
    assert marker in smollm2.tokenizer("<|im_end|>")["input_ids"]  # the user's tokenizer is as it was
    assert engine.beginning() == []
