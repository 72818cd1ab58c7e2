"""The middleware in agents: long runs stay within their window, and another process goes on where one stopped."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_agent import talk
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from tiny import TOOLS, chat_model

from agentcompact.errors import SettingsError
from langchain_agentcompact import ChatAgentCompact, LatentCompactionMiddleware, register_model, unload_model
from langchain_agentcompact.middleware import STATE_KEY
from langchain_agentcompact.registry import shared_model

TESTS = Path(__file__).parent
LONG_RUN = {"recursion_limit": 300}


@tool
def measure(berth: str) -> str:
    """Measure the depth at a berth."""
    return f"Berth {berth[:8]} is {len(berth)}.5 metres deep at low water."


@tool
def note(text: str) -> str:
    """Write something down."""
    return "noted"


class Steps(AgentMiddleware):
    """Makes the agent call tools so many times, and then answer."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def wrap_model_call(self, request, handler):
        done = sum(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="any" if done < self.count else "none"))

    async def awrap_model_call(self, request, handler):
        done = sum(isinstance(message, ToolMessage) for message in request.messages)
        return await handler(request.override(tool_choice="any" if done < self.count else "none"))


@pytest.fixture
def name(request):
    name = f"tiny-{request.node.name}"
    register_model(name, chat_model(template=TOOLS))
    yield name
    unload_model(name)


def small(name, **settings):
    return ChatAgentCompact(model=name, max_tokens=100, max_string_length=12, temperature=1.0, seed=2, **settings)


def replies_of(result):
    return [message for message in result["messages"] if isinstance(message, AIMessage)]


def memory_of(reply):
    return reply.response_metadata["agentcompact"]


def check_counts(replies):
    """Each reply read only what came since the one before, across compactions too."""
    for before, reply in itertools.pairwise(replies):
        cut = before.response_metadata["finish_reason"] == "length"
        known = before.usage_metadata["input_tokens"] + before.usage_metadata["output_tokens"] - cut
        assert reply.usage_metadata["input_token_details"]["cache_read"] == known


def test_ten_steps_read_every_token_once(name):
    agent = create_agent(small(name), tools=[measure, note], system_prompt="Audit it.", middleware=[Steps(10)])
    replies = replies_of(agent.invoke({"messages": [("user", "Go.")]}, LONG_RUN))
    assert len(replies) == 11
    check_counts(replies)
    read = sum(memory_of(reply)["prefilled"] for reply in replies)
    decoded = sum(reply.usage_metadata["output_tokens"] for reply in replies[:-1])
    assert read + decoded == replies[-1].usage_metadata["input_tokens"]


def test_forty_steps_finish_in_a_window_of_1500(name):
    policy = LatentCompactionMiddleware(trigger=("fraction", 0.8), keep=("messages", 6), strategy="two_pass")
    model = small(name, window=1500)
    agent = create_agent(model, tools=[measure, note], system_prompt="Audit it.", middleware=[policy, Steps(40)])
    result = agent.invoke({"messages": [("user", "Audit the harbour.")]}, LONG_RUN)
    messages, replies = result["messages"], replies_of(result)
    assert len(replies) == 41
    for call, answer in zip(messages[1:-1:2], messages[2::2], strict=True):
        assert [each["id"] for each in call.tool_calls] == [answer.tool_call_id]
    assert messages[-1].content
    assert all(memory_of(reply)["held_positions"] <= 1500 for reply in replies)
    reports = [report for reply in replies for report in memory_of(reply)["compactions"]]
    assert len(reports) >= 3
    assert {report["strategy"] for report in reports} == {"two_pass"}
    assert replies[-1].usage_metadata["input_tokens"] > 3 * 1500
    check_counts(replies)
    for at in range(len(replies)):  # the held end begins with no tool's result
        for report in memory_of(replies[at])["compactions"]:
            kept = messages[: 1 + 2 * at][-report["kept"] :]
            assert not isinstance(kept[0], ToolMessage)


async def test_agents_run_asynchronously(name):
    policy = LatentCompactionMiddleware(trigger=("tokens", 900), keep=("messages", 4), strategy="two_pass")
    agent = create_agent(small(name, window=1500), tools=[measure], middleware=[policy, Steps(12)])
    replies = replies_of(await agent.ainvoke({"messages": [("user", "Go.")]}, LONG_RUN))
    assert any(memory_of(reply)["compactions"] for reply in replies)
    check_counts(replies)


def test_the_middlewares_policy_wins_over_the_models(name):
    model = small(name, strategy="kvzip", trigger=("tokens", 5000), window=1500)
    policy = LatentCompactionMiddleware(trigger=("tokens", 700), strategy="streaming_llm", min_span=8)
    agent = create_agent(model, tools=[measure], middleware=[policy, Steps(8)])
    reports = [
        report
        for reply in replies_of(agent.invoke({"messages": [("user", "Go.")]}, LONG_RUN))
        for report in memory_of(reply)["compactions"]
    ]
    assert {report["strategy"] for report in reports} == {"streaming_llm"}
    off = create_agent(model, tools=[measure], middleware=[LatentCompactionMiddleware(trigger=None), Steps(4)])
    replies = replies_of(off.invoke({"messages": [("user", "Go.")]}, LONG_RUN))
    assert not any(memory_of(reply)["compactions"] for reply in replies)


def test_tools_and_the_system_prompt_count_towards_the_trigger(name):
    question = {"messages": [HumanMessage("a" * 100), AIMessage("b" * 100), HumanMessage("c")]}
    policy = LatentCompactionMiddleware(trigger=("tokens", 500), keep=("messages", 1), strategy="two_pass", min_span=8)
    model = small(name, window=1000)
    plain = create_agent(model, tools=[], middleware=[policy]).invoke(question)
    assert not memory_of(plain["messages"][-1])["compactions"]
    long = create_agent(model, tools=[], system_prompt="s" * 250, middleware=[policy]).invoke(question)
    assert memory_of(long["messages"][-1])["compactions"]


def test_messages_stay_and_the_handle_is_private(name, tmp_path):
    saver = InMemorySaver()
    policy = LatentCompactionMiddleware(trigger=("tokens", 600), keep=("messages", 2), strategy="two_pass", min_span=8)
    model = small(name, window=1500, snapshot_dir=str(tmp_path))
    agent = create_agent(model, tools=[measure], middleware=[policy, Steps(8)], checkpointer=saver)
    config = {**LONG_RUN, "configurable": {"thread_id": "one"}}
    result = agent.invoke({"messages": [("user", "Go.")]}, config)
    assert len(result["messages"]) == 18
    assert STATE_KEY not in result
    handle = agent.get_state(config).values[STATE_KEY]
    assert set(handle) == {"snapshot", "digest", "messages", "fingerprint", "tools"}
    assert (tmp_path / f"{handle['snapshot']}.kv").is_file()
    assert (tmp_path / f"{handle['snapshot']}.kv").stat().st_mode & 0o077 == 0


def test_other_models_are_called_as_they_are():
    policy = LatentCompactionMiddleware()
    agent = create_agent(FakeListChatModel(responses=["hello"]), tools=[], middleware=[policy])
    with pytest.warns(UserWarning, match="does nothing with FakeListChatModel"):
        result = agent.invoke({"messages": [("user", "Go.")]})
    assert result["messages"][-1].content == "hello"


def test_settings_that_make_no_sense_are_refused_when_it_is_made():
    with pytest.raises(SettingsError, match="'keeps'"):
        LatentCompactionMiddleware(keeps=("messages", 3))
    with pytest.raises(SettingsError, match="none of tokens, fraction, messages"):
        LatentCompactionMiddleware(trigger=("words", 3))
    with pytest.raises(SettingsError, match="a list of triggers"):
        LatentCompactionMiddleware(trigger=[{"tokens": 3, "messages": 4}, ("tokens", 9)])
    both = LatentCompactionMiddleware(trigger={"tokens": 600, "messages": 40})
    assert both.policy["trigger_when"] == "all"


def in_a_process(database, snapshots, *messages):
    paths = [str(TESTS), *sys.path]
    done = subprocess.run(
        [sys.executable, str(TESTS / "langchain_agent.py"), str(database), str(snapshots), *messages],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_resumes_from_the_snapshot_or_compacts_again(tmp_path):
    database, snapshots = tmp_path / "agent.db", tmp_path / "snapshots"
    said = [f"What did the keeper see on day {day}?" for day in range(9)]
    first = in_a_process(database, snapshots, *said)
    made = [reply["snapshot"] for reply in first if reply["snapshot"]]
    assert made
    for copy in ("resumed.db", "first.db", "second.db"):
        shutil.copy(database, tmp_path / copy)

    (resumed,) = in_a_process(tmp_path / "resumed.db", snapshots, "And then?")
    assert resumed["resumed"] == made[-1]["snapshot"]
    assert resumed["prefilled"] < resumed["prompt"] / 2

    shutil.rmtree(snapshots)
    again = [talk(str(tmp_path / copy), str(tmp_path / "none"), ["And then?"]) for copy in ("first.db", "second.db")]
    assert again[0][0]["resumed"] == ""
    assert again[0][0]["compactions"]
    assert [reply["content"] for reply in again[0]] == [reply["content"] for reply in again[1]]
    assert resumed["prompt"] == again[0][0]["prompt"]


def test_a_snapshot_of_other_messages_or_of_a_damaged_file_is_not_used(tmp_path):
    database, snapshots = str(tmp_path / "agent.db"), tmp_path / "snapshots"
    talk(database, str(snapshots), [f"What did the keeper see on day {day}?" for day in range(9)])
    for path in snapshots.glob("*.kv"):
        path.write_bytes(path.read_bytes()[:-100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (reply,) = talk(database, str(snapshots), ["And then?"])
    assert reply["resumed"] == ""
    assert reply["content"]
    shared_model("tiny-process").pool.states.clear()
