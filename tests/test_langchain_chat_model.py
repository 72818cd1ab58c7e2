"""The chat model: what it reads is counted, conversations never mix, and messages of every kind are taken."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from tiny import NO_SYSTEM, TOOLS, chat_model

from agentcompact import TransformersEngine
from agentcompact.errors import InputError, SettingsError
from agentcompact.strategies import make_strategy
from langchain_agentcompact import ChatAgentCompact, register_model, unload_model
from langchain_agentcompact.registry import shared_model

pytestmark = pytest.mark.usefixtures("no_network")

SMALL = {"strategy": "two_pass", "keep": ("messages", 2), "policy": {"min_span": 8}}


def readable(loaded):
    """Let a greedy random model write ASCII only, so that its replies are read again as they were written."""
    letters = [loaded.tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127)]
    known = {*letters, loaded.tokenizer.eos_token_id}
    weight = loaded.causal_lm.lm_head.weight
    weight[[token for token in range(weight.shape[0]) if token not in known]] = 0  # below the best of so many letters
    return loaded


@pytest.fixture
def name(request):
    """A tiny model of this test's own, so that nothing is held of other tests."""
    template = getattr(request, "param", None)
    name = f"tiny-{request.node.name}"
    register_model(name, readable(chat_model(**({} if template is None else {"template": template}))))
    yield name
    unload_model(name)


@pytest.fixture
def model(name):
    return ChatAgentCompact(model=name, max_tokens=12)


def details(message):
    return message.usage_metadata["input_token_details"]


def in_cache(message):
    """Tokens that a reply left in the cache: the last one of a reply cut at its length was not read yet."""
    cut = message.response_metadata["finish_reason"] == "length"
    return message.usage_metadata["output_tokens"] - cut


def fresh(model_name, messages, **settings):
    """What a model of the same weights answers that holds nothing."""
    register_model("fresh", TransformersEngine(shared_model(model_name).engine.model))
    return ChatAgentCompact(model="fresh", max_tokens=12, **settings).invoke(messages)


def test_a_conversation_reads_every_token_once(model):
    messages = [SystemMessage("Be brief."), HumanMessage("What is there?")]
    replies = [model.invoke(messages)]
    for turn in range(9):
        messages += [replies[-1], HumanMessage(f"And on day {turn}?")]
        replies.append(model.invoke(messages))
    for before, reply in itertools.pairwise(replies):
        known = before.usage_metadata["input_tokens"] + in_cache(before)
        assert details(reply)["cache_read"] == known
        assert details(reply)["cache_creation"] == reply.usage_metadata["input_tokens"] - known
    read = sum(details(reply)["cache_creation"] for reply in replies)
    assert read == replies[-1].usage_metadata["input_tokens"] - sum(in_cache(reply) for reply in replies[:-1])
    assert [reply.response_metadata["agentcompact"]["prefilled"] for reply in replies] == [
        details(reply)["cache_creation"] for reply in replies
    ]


def test_the_count_of_a_prompt_is_its_input_tokens(model):
    messages = [SystemMessage("Be brief."), HumanMessage("What is there?")]
    assert model.get_num_tokens_from_messages(messages) == model.invoke(messages).usage_metadata["input_tokens"]
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    counted = model.get_num_tokens_from_messages(messages, tools=[tool])
    assert counted == model.bind_tools([tool]).invoke(messages).usage_metadata["input_tokens"]
    assert model.get_token_ids("ab") == shared_model(model.model).engine.encode("ab")


def test_branches_share_what_they_have_in_common(name, model):
    start = [SystemMessage("You know the harbour by heart and answer in one word."), HumanMessage("Who is there?")]
    first = model.invoke(start)
    shared = model.get_num_tokens_from_messages(start[:1])
    other = model.invoke([start[0], HumanMessage("Who was there?")])
    assert 0 < details(other)["cache_read"] < shared
    again = model.invoke([*start, first, HumanMessage("Since when?")])
    assert details(again)["cache_read"] == first.usage_metadata["input_tokens"] + in_cache(first)
    assert again.content == fresh(name, [*start, first, HumanMessage("Since when?")]).content
    assert other.content == fresh(name, [start[0], HumanMessage("Who was there?")]).content


def test_a_repeated_history_is_answered_again_from_the_cache(model):
    messages = [HumanMessage("What is there?")]
    first, second = model.invoke(messages), model.invoke(messages)
    assert first.content == second.content
    assert details(second)["cache_creation"] == len(
        shared_model(model.model).engine.encode("<|im_start|>assistant\n", control_tokens=True)
    )
    assert len(shared_model(model.model).pool.states) == 1


def test_an_edited_history_is_read_from_the_edit_on(name, model):
    messages = [SystemMessage("A long enough system prompt."), HumanMessage("One?"), AIMessage("1"), HumanMessage("2?")]
    model.invoke(messages)
    edited = [messages[0], HumanMessage("Uno?"), *messages[2:]]
    reply = model.invoke(edited)
    assert details(reply)["cache_read"] > 0
    assert reply.content == fresh(name, edited).content
    foreign = [messages[0], messages[1], AIMessage("Not what this model said."), HumanMessage("2?")]
    assert model.invoke(foreign).content == fresh(name, foreign).content


def until_compacted(model):
    """Talk until something was compacted; return the messages, the next user's among them."""
    messages, compactions = [HumanMessage("Start.")], 0
    while compactions == 0:
        reply = model.invoke(messages)
        compactions = len(reply.response_metadata["agentcompact"]["compactions"])
        messages += [reply, HumanMessage("Tell me about the harbour, and then more about the harbour.")]
    return messages


def test_an_edit_behind_a_compaction_goes_back_to_the_snapshot_before(name):
    model = ChatAgentCompact(model=name, max_tokens=12, window=400, **SMALL)
    messages = until_compacted(model)
    edited = [*messages[:-5], HumanMessage("Something else.")]
    reply = model.invoke(edited)
    assert details(reply)["cache_read"] > details(reply)["cache_creation"]
    assert not reply.response_metadata["agentcompact"]["compactions"]
    assert reply.content == fresh(name, edited).content
    whole = model.invoke(messages)
    assert details(whole)["cache_read"] > details(whole)["cache_creation"]


def test_branches_behind_a_compaction_share_its_entries(name):
    model = ChatAgentCompact(model=name, max_tokens=12, window=400, **SMALL)
    messages = until_compacted(model)
    branches = [model.invoke([*messages[:-1], HumanMessage(text)]) for text in ("One?", "Two?", "Three?")]
    states = sorted(shared_model(name).pool.states, key=lambda state: state.used)[-2:]
    spans = [state.manager.cache.full_layers[0][1].span for state in states]
    assert spans[0].keys.data_ptr() == spans[1].keys.data_ptr()
    for branch in branches:
        assert details(branch)["cache_read"] >= messages[-2].usage_metadata["input_tokens"]


def test_two_threads_and_twenty_async_calls_do_not_mix(name, model):
    def talk(number):
        messages, contents = [HumanMessage(f"I am caller {number} of this model.")], []
        for turn in range(3):
            reply = model.invoke(messages)
            messages += [reply, HumanMessage(f"Turn {turn} of caller {number}.")]
            contents.append(reply.content)
        return contents

    alone = [talk(number) for number in range(2)]
    shared_model(name).pool.states.clear()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, range(2))) == alone

    async def ask_all():
        return await asyncio.gather(*(model.ainvoke(f"Question number {number}?") for number in range(20)))

    together = [reply.content for reply in asyncio.run(ask_all())]
    shared_model(name).pool.states.clear()
    assert together == [model.invoke(f"Question number {number}?").content for number in range(20)]
    assert len(set(together)) > 1


def test_the_pool_is_bounded_and_comes_back_from_disk(name):
    model = ChatAgentCompact(model=name, max_tokens=12, max_states=2)
    first = model.invoke("Question number 0?")
    for number in range(1, 4):
        model.invoke(f"Question number {number}?")
    pool = shared_model(name).pool
    assert sum(state.spilled is None for state in pool.states) == 2
    assert sum(state.spilled is not None for state in pool.states) == 2
    messages = [HumanMessage("Question number 0?"), first, HumanMessage("And then?")]
    reply = model.invoke(messages)
    assert details(reply)["cache_read"] == first.usage_metadata["input_tokens"] + in_cache(first)
    assert reply.content == fresh(name, messages).content
    for number in range(9):
        model.invoke(f"Another question, number {number}?")
    assert len(pool.states) <= 4
    assert len(list(pool.journal.snapshots.glob("*.kv"))) <= 2


def test_streams_say_the_same_and_end_with_one_usage(model):
    whole = model.invoke("What is there?")
    chunks = list(model.stream("What is there?"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [chunk.usage_metadata is not None for chunk in chunks].count(True) == 1
    assert chunks[-1].chunk_position == "last"
    assert chunks[-1].usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_a_stream_that_is_left_early_frees_the_model(name, model):
    long = ChatAgentCompact(model=name, max_tokens=400, temperature=1.0, seed=3)
    stream = long.stream("What is there?")
    next(stream)
    nested = model.invoke("Asked while another stream is open.")  # waits, and does not hang
    assert nested.content == fresh(name, "Asked while another stream is open.").content
    stream.close()
    stopped = long.stream("What is there then?")
    next(stopped)
    stopped.close()
    begun = time.perf_counter()
    model.invoke("After that.")
    assert time.perf_counter() - begun < 30


def test_stop_strings_and_limits_are_said(model):
    whole = model.invoke("What is there?")
    assert whole.response_metadata["finish_reason"] == "length"
    stop = whole.content[3:5]
    cut = model.invoke("What is there?", stop=[stop])
    assert cut.content == whole.content[: whole.content.index(stop)].strip()
    assert cut.response_metadata["finish_reason"] == "stop"
    after = [HumanMessage("What is there?"), cut, HumanMessage("And?")]
    assert model.invoke(after).content == fresh(model.model, after).content
    assert model.invoke("What is there?", max_tokens=3).usage_metadata["output_tokens"] == 3


def test_messages_of_every_kind(model):
    call = {"name": "look", "args": {"at": "sea"}, "id": "abc"}
    other = {"name": "look", "args": {"at": "sky"}, "id": "abd"}
    orphan = [HumanMessage("Hi"), ToolMessage("42", tool_call_id="nobody"), HumanMessage("So?")]
    parallel = [
        HumanMessage("Hi"),
        AIMessage("", tool_calls=[call, other]),
        ToolMessage("blue", tool_call_id="abc"),
        ToolMessage([{"type": "text", "text": "grey"}], tool_call_id="abd", status="error"),
    ]
    written = [
        SystemMessage("S"),
        ChatMessage(role="user", content=[{"type": "text", "text": "a"}, "b"]),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "c"}]),
        HumanMessage(""),
    ]
    for messages in (orphan, parallel, written, [AIMessage("I begin."), HumanMessage("Good.")]):
        reply = model.invoke(messages)
        again = [*messages, reply, HumanMessage("More?")]
        assert details(model.invoke(again))["cache_read"] == reply.usage_metadata["input_tokens"] + in_cache(reply)


@pytest.mark.parametrize("name", [NO_SYSTEM, TOOLS], indirect=True)
def test_templates_without_systems_and_with_tools(model):
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "look", "args": {}, "id": "abc"}
    messages = [
        SystemMessage("S"),
        HumanMessage("Hi"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("x", tool_call_id="abc"),
    ]
    bound = model.bind_tools([tool])
    reply = bound.invoke(messages)
    follow = bound.invoke([*messages, reply, HumanMessage("More?")])
    assert details(follow)["cache_read"] == reply.usage_metadata["input_tokens"] + in_cache(reply)


def test_what_cannot_be_read_is_refused_in_one_line(model):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(InputError, match="reads text only: .*'image_url'"):
        model.invoke([HumanMessage([image])])
    with pytest.raises(InputError, match="role 'critic'"):
        model.invoke([ChatMessage(role="critic", content="no")])
    with pytest.raises(InputError, match="not UTF-8"):
        model.invoke("\ud800")
    with pytest.raises(SettingsError, match="did you mean 'strategy'"):
        ChatAgentCompact(stratgy="two_pass")
    with pytest.raises(SettingsError, match="ratio"):
        ChatAgentCompact(ratio=0.5)
    with pytest.raises(SettingsError, match="a call takes no 'max_token'"):
        model.invoke("Hi", max_token=3)
    with pytest.raises(InputError, match="tool_choice 'any' needs tools"):
        model.bind_tools([], tool_choice="any")


def test_a_conversation_that_cannot_be_brought_down_overflows(name):
    model = ChatAgentCompact(model=name, max_tokens=12, window=128, auto=False)
    with pytest.raises(ContextOverflowError, match="window of 128"):
        model.invoke("x" * 200)
    assert model.invoke("x").content == fresh(name, "x").content


class Events(BaseCallbackHandler):
    raise_error = True

    def __init__(self, model):
        self.model, self.events, self.ends = model, [], []

    def on_custom_event(self, name, data, **_):
        assert self.model.get_num_tokens_from_messages([HumanMessage("A callback may ask the model.")])
        self.events.append((name, data["strategy"]))

    def on_llm_end(self, response, **_):
        self.ends.append(response.generations[0][0].message.response_metadata["agentcompact"])


def test_compactions_are_reported_to_callbacks_and_in_the_metadata(name):
    model = ChatAgentCompact(model=name, max_tokens=12, window=400, **SMALL)
    seen = Events(model)
    messages, reports = [HumanMessage("Start.")], []
    for turn in range(8):
        reply = model.invoke(messages, {"callbacks": [seen]})
        found = reply.response_metadata["agentcompact"]
        assert found["held_positions"] <= 400
        reports += found["compactions"]
        messages += [reply, HumanMessage(f"Tell me about the harbour on day {turn} of the audit.")]
    assert reports
    assert seen.events == [("agentcompact_compaction", "two_pass")] * len(reports)
    assert sum(len(end["compactions"]) for end in seen.ends) == len(reports)
    assert found["ratio"] > 1
    assert reply.usage_metadata["input_tokens"] > 400
    streamed = ChatAgentCompact(model=name, max_tokens=12, window=300, **SMALL)
    list(streamed.stream(messages, {"callbacks": [seen]}))
    assert seen.ends[-1]["compactions"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), IndexError("broken")])
def test_a_strategy_that_fails_blocks_no_message(name, monkeypatch, error):
    def fail(self, request):
        raise error

    monkeypatch.setattr(type(make_strategy("two_pass")), "compact", fail)
    model = ChatAgentCompact(model=name, max_tokens=12, window=400, **SMALL)
    messages, used, notes = [HumanMessage("Start.")], set(), []
    for turn in range(12):
        reply = model.invoke(messages)
        found = reply.response_metadata["agentcompact"]
        used.update(report["strategy"] for report in found["compactions"])
        notes += found["notes"]
        assert found["held_positions"] <= 400
        messages += [reply, HumanMessage(f"Tell me about the harbour on day {turn} of the audit.")]
    assert used == {"streaming_llm"}
    assert any(str(error) in note for note in notes)


def test_ten_models_are_made_at_once_and_share_their_weights():
    unload_model("smollm2")
    begun = time.perf_counter()
    made = [ChatAgentCompact(model="smollm2", temperature=0.1 * n) for n in range(10)]
    assert time.perf_counter() - begun < 2
    assert not shared_model("smollm2").is_loaded
    assert len({id(model._shared()) for model in made}) == 1
    assert made[0].profile["max_input_tokens"] == 8192
    assert ChatAgentCompact(model="smollm2", window=1500).profile["max_input_tokens"] == 1500


def test_settings_survive_serialisation():
    model = ChatAgentCompact(model="smollm2", strategy="two_pass", trigger=[("tokens", 600), ("messages", 40)], seed=3)
    revived = load(dumpd(model), valid_namespaces=["langchain_agentcompact"], allowed_objects=[ChatAgentCompact])
    assert revived._identifying_params == model._identifying_params
    assert revived._identifying_params["policy"]["strategy"] == "two_pass"
    assert model.session_policy().trigger == (("tokens", 600.0), ("messages", 40.0))
    both = ChatAgentCompact(trigger={"tokens": 600, "messages": 40}).session_policy()
    assert both.trigger_when == "all"


def test_sampling_is_seeded_or_new_each_time(name):
    seeded = ChatAgentCompact(model=name, max_tokens=12, temperature=1.0, seed=7)
    assert seeded.invoke("Hi").content == seeded.invoke("Hi").content
    free = ChatAgentCompact(model=name, max_tokens=12, temperature=1.0)
    assert len({free.invoke("Hi").content for _ in range(4)}) > 1
