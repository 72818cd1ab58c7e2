"""The parts of a session by themselves: bounds, policies, pieces of a template, plans, streams, moved keys."""

from __future__ import annotations

import pytest
import torch
from tiny import CHATML, DROPS_REASONING, NO_SYSTEM, TOOLS, byte_tokenizer, chat_model, tiny_model, tiny_tokens

from agentcompact import CompactionRequest, TransformersEngine, make_strategy
from agentcompact.engines.text_stream import TextStream
from agentcompact.errors import CapabilityError, InputError, SettingsError
from agentcompact.models import render_chat
from agentcompact.session import Message, Session, SessionPolicy, ToolCall, as_message, read_bound, read_policy
from agentcompact.session.messages import has_open_call, round_start
from agentcompact.session.planning import held_in
from agentcompact.session.rendering import ConversationTemplate
from agentcompact.session.repositioning import Piece, repositioned


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("80%", ("fraction", 0.8)),
        (0.8, ("fraction", 0.8)),
        ("0.8", ("fraction", 0.8)),
        (6000, ("tokens", 6000.0)),
        ("6000", ("tokens", 6000.0)),
        ("tokens:50", ("tokens", 50.0)),
        (("messages", 4), ("messages", 4.0)),
        ("messages:40", ("messages", 40.0)),
    ],
)
def test_bounds(text, bound):
    assert read_bound(text) == bound


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "150%", "words:3", "nan"])
def test_no_bounds(text):
    with pytest.raises(SettingsError, match="trigger"):
        read_policy(trigger=text)


def test_policy_sources(tmp_path, monkeypatch):
    file = tmp_path / "config.toml"
    file.write_text(
        '[session]\nratio = 8\ntrigger = [["tokens", 600], ["messages", 5]]\nkeep = "20%"\n[other]\na = 1\n'
    )
    monkeypatch.setenv("AGENTCOMPACT_SESSION_KEEP", "messages:3,tokens:50")
    policy = read_policy(file, min_span=9)
    assert (policy.ratio, policy.min_span) == (8, 9)
    assert policy.trigger == (("tokens", 600), ("messages", 5))
    assert policy.keep == (("messages", 3), ("tokens", 50))
    monkeypatch.setenv("AGENTCOMPACT_SESSION_RATIO", "none")
    with pytest.raises(SettingsError, match="ratio"):
        read_policy(tmp_path / "config.toml")
    file.write_text("[session]\nratoi = 8\n")
    monkeypatch.delenv("AGENTCOMPACT_SESSION_RATIO")
    with pytest.raises(SettingsError, match="ratoi"):
        read_policy(file)
    file.write_text("no toml")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_policy(file)
    with pytest.raises(SettingsError, match="no settings file"):
        read_policy(tmp_path / "nothing.toml")
    with pytest.raises(SettingsError, match="did you mean 'ratio'"):
        read_policy(rato=3)


def test_triggers():
    both = SessionPolicy(trigger=(("tokens", 100), ("messages", 4)))
    assert both.is_triggered(100, 1, 1000)
    assert both.is_triggered(5, 4, 1000)
    assert not both.is_triggered(99, 3, 1000)
    every = both.model_copy(update={"trigger_when": "all"})
    assert not every.is_triggered(100, 3, 1000)
    assert every.is_triggered(100, 4, 1000)
    assert both.trigger_tokens(1000) == 100
    assert SessionPolicy(trigger=(("messages", 4),)).trigger_tokens(1000) == 1000


def template_of(text, tools=None):
    tokenizer = byte_tokenizer(text)
    return ConversationTemplate(
        None if text is None else lambda m, t, reply: render_chat(tokenizer, m, t, generation_prompt=reply), tools
    )


TALK = [
    Message(role="system", content="Be kind."),
    Message(role="user", content="One?"),
    Message(role="assistant", content="First.|Yes."),
    Message(role="user", content="Two?"),
]


@pytest.mark.parametrize("text", [CHATML, DROPS_REASONING, NO_SYSTEM, TOOLS, None])
def test_the_pieces_are_the_whole_text(text):
    template = template_of(text)
    rendered = template.render(TALK)
    whole = "".join(rendered.pieces)
    assert len(rendered.pieces) == 4
    assert whole + rendered.reply == template._text(TALK, reply=True)
    assert all(message.content.split("|")[-1] in whole for message in TALK)
    assert "Two?" in rendered.pieces[3]


def test_what_a_template_cannot_do_is_written_as_text():
    call = Message(role="assistant", tool_calls=(ToolCall(name="look", arguments={"at": "sea"}),))
    result = Message(role="tool", content="calm", name="look")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    talk = [TALK[0], TALK[1], call, result]
    plain = "".join(template_of(NO_SYSTEM, tools).render(talk).pieces)
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>' in plain
    assert "<tool_response>\nlook: calm\n</tool_response>" in plain
    assert '<tools>\n{"type": "function"' in plain
    assert plain.startswith("<|im_start|>user\nBe kind.")
    assert len(template_of(NO_SYSTEM, tools).fallbacks) == 3
    native = "".join(template_of(TOOLS, tools).render(talk).pieces)
    assert native.startswith("<|im_start|>system\nTools: [{")
    assert "<|im_start|>tool\ncalm" in native
    assert template_of(TOOLS, tools).fallbacks == []


def test_messages_from_other_tools():
    read = as_message(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"at": "sea"}'}}],
        }
    )
    assert read.tool_calls[0].arguments == {"at": "sea"}
    for bad in ({"role": "nobody"}, {"content": "x"}, {"role": "user", "colour": 1}):
        with pytest.raises(InputError, match="no message"):
            as_message(bad)
    with pytest.raises(InputError, match="no JSON"):
        as_message({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]})


def test_rounds():
    calls = tuple(ToolCall(name="f", id=name) for name in "ab")
    talk = [
        Message(role="user", content="x"),
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", tool_call_id="a"),
        Message(role="tool", tool_call_id="b"),
        Message(role="assistant", content="y"),
    ]
    assert [round_start(talk, index) for index in range(6)] == [0, 1, 1, 1, 4, 5]
    assert [has_open_call(talk[:count]) for count in range(6)] == [False, False, True, True, False, False]


def test_a_stream_gives_whole_characters_and_holds_stops_back():
    tokenizer = byte_tokenizer()
    ids = tokenizer("  Gr\u00fc\u00dfe \U0001f9ad now\nUser: x", add_special_tokens=False)["input_ids"]
    stream = TextStream(lambda each: tokenizer.decode(each, skip_special_tokens=True), ("\nUser:",))
    pieces = [stream.add(token) for token in ids[:-3]]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == "Gr\u00fc\u00dfe \U0001f9ad now"
    assert stream.finish("Gr\u00fc\u00dfe \U0001f9ad now") == ""


def slow_moved(engine, keys, old, new):
    """Each key by itself: back from its old position, forth to the new one."""
    rows = [
        engine.rotate(engine.rotate(keys[:, i : i + 1].double().float(), old[i : i + 1], back=True), new[i : i + 1])
        for i in range(keys.shape[1])
    ]
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_moved_keys_are_rotated_and_nothing_else(kind):
    engine = TransformersEngine(tiny_model(kind))
    cache = engine.prefill(tiny_tokens(100))
    cache = make_strategy("recent").compact(CompactionRequest(engine, cache, 10, start=5, stop=80)).cache
    moved = repositioned(engine, cache, [Piece(5, 80, 20)])
    assert moved.next_position == 45
    assert moved.entries == cache.entries
    assert len(moved.token_ids) == 45
    for index, layer in cache.full_layers:
        now = dict(moved.full_layers)[index]
        assert torch.equal(now.span.values, layer.span.values)
        head = layer.span.positions < 5
        assert torch.equal(now.span.keys[head], layer.span.keys[head])
        wanted = 5 + torch.floor((layer.span.positions - 5).double() * 20 / 75).int()
        assert torch.equal(now.span.positions[~head], wanted[~head])
        torch.testing.assert_close(
            now.span.keys[None], slow_moved(engine, layer.span.keys[None], layer.span.positions, now.span.positions)
        )
        live = layer.tail.keys[0, :, : layer.length]
        torch.testing.assert_close(
            now.tail.keys[0], slow_moved(engine, live, torch.arange(80, 100), torch.arange(25, 45))
        )
    assert cache.next_position == 100
    engine.next_token_logits(moved, [4])
    with pytest.raises(CapabilityError, match="compacted span"):
        repositioned(engine, cache, [Piece(5, 90, 20)])


def test_moving_everything_alike_changes_no_answer():
    """Attention goes by distances: with all keys moved by as much, what follows is the same."""
    engine = TransformersEngine(tiny_model("llama"))
    ids = tiny_tokens(60)
    cache = engine.prefill(ids)
    before = engine.next_token_logits(cache.fork(), [7])
    spans = [cache.source(index, 0, 60) for index, _ in cache.full_layers]
    held = cache.replaced(spans, 0, 60)
    shifted = held.fork()
    for _, layer in shifted.full_layers:  # as if 30 tokens had been before it
        old = layer.span.positions
        keys = engine.rotate(engine.rotate(layer.span.keys[None], old, back=True), old + 30)[0]
        span = type(layer.span)(keys, layer.span.values, layer.span.bias, old + 30, layer.span.offsets)
        layer.hold(span, 90)
    torch.testing.assert_close(engine.next_token_logits(shifted, [7]), before, atol=1e-4, rtol=1e-4)


def test_held_in_counts_entries_by_position():
    engine = TransformersEngine(tiny_model("llama"))
    cache = (
        make_strategy("recent").compact(CompactionRequest(engine, engine.prefill(tiny_tokens(100)), 10, stop=80)).cache
    )
    parts = [held_in(cache, start, start + 20) for start in range(0, 100, 20)]
    assert sum(parts) == cache.held_positions == 30
    assert parts[-1] == 20


def test_the_environment_reaches_a_session_without_a_policy(monkeypatch):
    monkeypatch.setenv("AGENTCOMPACT_SESSION_RATIO", "7")
    engine = TransformersEngine(chat_model())
    assert Session(engine).policy.ratio == 7
    assert Session(engine, min_span=9).policy.ratio == 7
    assert Session(engine, SessionPolicy(ratio=3)).policy.ratio == 3


def test_the_highest_ratio_gives_way_to_a_higher_one():
    assert SessionPolicy().highest_ratio == 64
    assert SessionPolicy(ratio=100).highest_ratio == 100
    with pytest.raises(SettingsError, match="below the ratio"):
        read_policy(ratio=100, max_ratio=50)


def test_a_stop_string_never_flashes_up():
    stream = TextStream(lambda ids: "".join(map(chr, ids)), ("\n\n", "END"))
    shown = [(stream.add(ord(letter)), stream.text)[1] for letter in "One ENTRY, then END"]
    assert shown[-1] == "One ENTRY, then"  # what may begin a stop string waits until it does not
    assert "One E" not in shown
    assert "One ENT" in shown
