"""Tool calls read out of replies, forced choices and schemas: what comes out always is what was asked for."""

from __future__ import annotations

import json

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from tiny import TOOLS, chat_model
from typing_extensions import TypedDict

from agentcompact.errors import InputError
from langchain_agentcompact import ChatAgentCompact, register_model, unload_model
from langchain_agentcompact.constraint import JsonConstraint, answer_schema, bounded
from langchain_agentcompact.registry import shared_model
from langchain_agentcompact.tool_calls import ToolCallForm, VisibleText, parse_reply, read_form

pytestmark = pytest.mark.usefixtures("no_network")

NAMES = ("look", "add")
LLAMA3 = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% else %}{{ m["content"] }}{% endif %}<|eot|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@tool
def look(at: str, times: int = 1) -> str:
    """Look at something."""
    return f"{at} is blue"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def model():
    register_model("tiny-tools", chat_model(template=TOOLS))
    yield ChatAgentCompact(model="tiny-tools", max_tokens=200)
    unload_model("tiny-tools")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is blue.", "It is blue.", []),
        ('<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>', "", [("look", {"at": "sea"})]),
        ('Wait.\n<tool_call>{"name": "look", "arguments": {}}', "Wait.", [("look", {})]),
        (
            '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
            "",
            [("look", {"at": "sea"}), ("add", {"a": 1, "b": 2})],
        ),
        ("<tool_call>{'name': 'look', 'arguments': {'at': None}}</tool_call>", "", [("look", {"at": None})]),
        ('<function=look>{"at": "sea"}</function>', "", [("look", {"at": "sea"})]),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
            "</tool_call>",
            "",
            [("add", {"a": 1, "b": 2})],
        ),
        ('[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sea"}}]', "", [("look", {"at": "sea"})]),
        ('[TOOL_CALLS]look[ARGS]{"at": "sea"}', "", [("look", {"at": "sea"})]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ('{"name": "add", "parameters": {}}; {"name": "look", "parameters": {}}', "", [("add", {}), ("look", {})]),
        ('```json\n{"name": "look", "arguments": {"at": "sea"}}\n```', "", [("look", {"at": "sea"})]),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('{"function": {"name": "look", "arguments": {}}}', "", [("look", {})]),
        ("See {x} and [y].", "See {x} and [y].", []),
        ("", "", []),
    ],
)
def test_calls_are_read_out_of_every_common_form(text, content, calls):
    parsed = parse_reply(text, NAMES)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert all(len(call.id) == 9 for call in parsed.calls)
    assert not parsed.failed


def test_a_call_that_cannot_be_read_is_kept_as_it_was_written():
    parsed = parse_reply('Hm. <tool_call>{"name": "look", "argu</tool_call>', NAMES)
    assert (parsed.content, parsed.calls) == ("Hm.", [])
    assert parsed.failed == ['<tool_call>{"name": "look", "argu</tool_call>']


def test_forms_are_read_off_the_template(model):
    assert shared_model("tiny-tools").form == ToolCallForm("<tool_call>", "</tool_call>", "arguments")
    register_model("llama3-form", chat_model(template=LLAMA3))
    assert shared_model("llama3-form").form == ToolCallForm("", "", "parameters")
    assert read_form(None) == ToolCallForm()


def test_nothing_of_a_call_is_shown_while_it_streams():
    for text in ("Wait a <b>.\n<tool_call>{}</tool_call>", '{"name": "look"}', "See [TOOL_CALLS]x", "```\nx"):
        visible = VisibleText(ToolCallForm(), watching=True)
        shown = "".join(visible.add(character) for character in text)
        assert shown in ("Wait a <b>.", "", "See")
    visible = VisibleText(ToolCallForm(), watching=True)
    text = "a < b, and <tool is no call"
    assert "".join(visible.add(character) for character in text) + visible.finish(text) == text


@pytest.mark.parametrize("choice", ["any", "required", True, {"type": "function", "function": {"name": "look"}}])
def test_a_forced_choice_is_one_call_that_matches_its_schema(model, choice):
    reply = model.bind_tools([look, add], tool_choice=choice).invoke("What colour is the sea?")
    (call,) = reply.tool_calls
    assert call["name"] == "look" or choice in ("any", "required", True)
    {"look": look, "add": add}[call["name"]].args_schema.model_validate(call["args"])
    assert reply.response_metadata["finish_reason"] == "tool_calls"
    assert reply.content == ""


def test_a_forced_call_is_read_once_and_looks_like_the_templates_own(model):
    bound = model.bind_tools([add], tool_choice="add")
    messages = [HumanMessage("One and two?")]
    reply = bound.invoke(messages)
    (call,) = reply.tool_calls
    after = [*messages, reply, ToolMessage("3", tool_call_id=call["id"])]
    follow = model.bind_tools([add]).invoke(after)
    known = reply.usage_metadata["input_tokens"] + reply.usage_metadata["output_tokens"]
    assert follow.usage_metadata["input_token_details"]["cache_read"] == known
    state = max(shared_model("tiny-tools").pool.states, key=lambda state: state.used)
    text = shared_model("tiny-tools").engine.model.tokenizer.decode(state.manager.cache.token_ids)
    body = json.dumps({"name": "add", "arguments": call["args"]})
    assert f"<|im_start|>assistant\n<tool_call>{body}</tool_call><|im_end|>\n<|im_start|>tool" in text


def test_no_call_comes_where_none_is_wanted(smollm2):
    """Three calls in the history make the model write a fourth, unless it may not."""
    register_model("smollm2-tests", smollm2)
    model = ChatAgentCompact(model="smollm2-tests", max_tokens=30)
    messages = []
    for number in range(3):
        call = json.dumps({"name": "look", "arguments": {"at": f"berth {number}"}})
        messages += [HumanMessage(f"Look at berth {number}."), AIMessage(f"<tool_call>\n{call}\n</tool_call>")]
    messages.append(HumanMessage("Look at berth 3."))
    assert model.bind_tools([look]).invoke(messages, max_tokens=80).tool_calls
    reply = model.bind_tools([look], tool_choice="none").invoke(messages)
    assert reply.content
    assert "<tool_call>" not in reply.content
    assert not reply.tool_calls


def test_streamed_calls_are_numbered_chunks(model):
    chunks = list(model.bind_tools([look, add], tool_choice="any").stream("Go."))
    calls = [call for chunk in chunks for call in chunk.tool_call_chunks]
    assert [call["index"] for call in calls] == [0]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(whole.tool_calls) == 1
    assert whole.content == ""
    assert chunks[-1].chunk_position == "last"


class Harbour(BaseModel):
    """A harbour."""

    name: str
    depth: int = Field(description="in metres")
    tags: list[str]
    owner: str | None = None


class Short(TypedDict):
    """A short one."""

    name: str
    open: bool


DEPTH = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "properties": {"depth": {"type": "integer"}}, "required": ["depth"]}},
}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("limit", [90, 200])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_structured_output_is_complete_at_every_limit_and_temperature(model, method, limit, temperature):
    """A random model would never close a string by itself."""
    small = model.model_copy(update={"max_tokens": limit, "temperature": temperature, "seed": 5})
    found = small.with_structured_output(Harbour, method=method).invoke("Describe it.")
    assert isinstance(found, Harbour)


def test_structured_output_of_other_kinds(model):
    typed = model.with_structured_output(Short).invoke("Describe it.")
    assert set(typed) == {"name", "open"}
    assert isinstance(typed["open"], bool)
    raw = model.with_structured_output(Short, include_raw=True).invoke("Describe it.")
    assert raw["parsed"] == json.loads(raw["raw"].content)
    assert raw["parsing_error"] is None
    free = model.bind(response_format={"type": "json_object"}).invoke("Describe it.")
    assert isinstance(json.loads(free.content), dict)


def test_an_agent_may_call_tools_before_its_structured_answer(model):
    """With tools a reply is a call or the answer, and nothing else: both come up among random replies."""
    free = model.model_copy(update={"temperature": 1.0})
    bound = free.bind_tools([look], response_format=DEPTH)
    replies = [bound.invoke("Describe it.", seed=seed) for seed in range(12)]
    calls = [reply for reply in replies if reply.tool_calls]
    answers = [reply for reply in replies if not reply.tool_calls]
    assert calls
    assert answers
    assert all(set(json.loads(reply.content)) == {"depth"} for reply in answers)
    assert all(reply.tool_calls[0]["name"] == "look" and reply.content == "" for reply in calls)


def test_a_schema_that_does_not_fit_says_so(model):
    tight = model.model_copy(update={"max_tokens": 10})
    with pytest.raises(ContextOverflowError, match="an answer of 10 tokens cannot hold this schema: raise max_tokens"):
        tight.with_structured_output(Harbour).invoke("Describe it.")
    with pytest.raises(InputError, match="the schema cannot be followed"):
        model.bind(response_format={"type": "nonsense"}).invoke("Describe it.")
    with pytest.raises(InputError, match="tool_choice 'sing' is none of the tools"):
        model.bind_tools([look], tool_choice="sing")


def test_strings_get_a_bound_and_objects_no_other_keys():
    schema = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "code": {"type": "string", "pattern": "^a+$"}},
        "required": ["type"],
    }
    made = bounded(schema, 40)
    assert made["properties"] == {
        "type": {"type": "string", "maxLength": 40},
        "code": {"type": "string", "pattern": "^a+$"},
    }
    assert made["additionalProperties"] is False
    assert "maxLength" not in schema["properties"]["type"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "number"}}, "required": ["a"]},
        {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 4}]},
        {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
        {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
    ],
)
def test_every_random_answer_is_closed_in_time(model, schema):
    import torch

    tokenizer = shared_model("tiny-tools").grammar_tokenizer
    engine = shared_model("tiny-tools").engine
    for seed in range(5):
        constraint, ids = JsonConstraint(tokenizer, answer_schema(schema, 512), 40), []
        generator = torch.Generator().manual_seed(seed)
        while len(ids) < 40:
            scores = constraint.allow(torch.randn(1, tokenizer.vocab_size, generator=generator))
            token = constraint.take(int(scores.argmax()))
            if token in tokenizer.eos_tokens:
                break
            ids.append(token)
        assert len(ids) < 40
        json.loads(engine.decode_text(ids))


def test_the_history_may_hold_calls_that_failed(model):
    failed = AIMessage(
        "Hm.", invalid_tool_calls=[{"name": None, "args": "<tool_call>{x", "id": None, "error": "no JSON"}]
    )
    reply = model.bind_tools([look]).invoke([HumanMessage("Hi"), failed, HumanMessage("Again.")])
    assert reply.usage_metadata["input_tokens"] > len("<tool_call>{x")
