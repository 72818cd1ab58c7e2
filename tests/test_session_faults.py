"""Faults that were found by attacking conversations: each test failed before its fault was mended."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing

import pytest
from tiny import NO_SYSTEM, chat_model

from agentcompact import SamplingSettings, TransformersEngine
from agentcompact.errors import DocumentError, SettingsError
from agentcompact.session import Session, SessionPolicy, VetoError


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(chat_model())


def opened(engine, folder=None, **settings):
    named = {
        name: settings.pop(name)
        for name in ("system", "tools", "before_compaction", "after_compaction")
        if name in settings
    }
    policy = {"strategy": "two_pass", "window": 1000, "min_span": 8, "keep": ("messages", 2), **settings}
    return Session(
        engine, SessionPolicy(**policy), folder=folder, sampling=SamplingSettings(max_new_tokens=12), **named
    )


def assert_sound(made):
    """What is held covers the cache without gaps."""
    position = 0
    for held in made.memory.context.held:
        assert held.start == position
        position = held.stop
    assert position == made.cache.next_position == len(made.cache.token_ids)
    assert made.cache.held_positions <= made.memory.window


def test_undo_after_a_message_that_was_read_in_blocks(engine):
    made = opened(engine)
    made.send("Hello there.")
    assert made.send("x" * 3000).compactions
    length = made.cache.next_position
    made.undo()
    assert_sound(made)
    made.send("And now?")
    assert_sound(made)
    assert made.cache.next_position < length + 100  # nothing is there twice


def test_a_message_refused_halfway_through_its_blocks_leaves_nothing(engine, tmp_path):
    asked = []

    def veto(plan):
        asked.append(plan)
        return None if len(asked) < 3 else False

    with opened(engine, tmp_path / "s", before_compaction=veto) as made:
        made.send("Hello there.")
        position = made.cache.next_position
        made.add("y" * 3000)
        with pytest.raises(VetoError):
            made.reply()
        assert made.status().compactions == 0
        assert made.cache.next_position - position < 20
        made.delete_from(3)
    with opened(engine, tmp_path / "s") as made:
        assert_sound(made)
        assert made.cache.next_position - position < 20


def test_killed_while_a_message_is_read_in_blocks(engine, tmp_path):
    child = os.fork()
    if child == 0:
        import torch

        torch.set_num_threads(1)
        done = []

        def kill(report):
            done.append(report)
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        made = opened(engine, tmp_path / "s", after_compaction=kill)
        made.send("Hello there.")
        made.send("y" * 3000)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    with opened(engine, tmp_path / "s") as made:
        assert len(made.messages) == 3
        made.reply()
        assert_sound(made)
        assert made.cache.next_position < 3150


def test_a_long_message_whose_blocks_are_moved_down(engine):
    made = opened(engine, max_ratio=64.0)
    made.send("Hello there.")
    made.send("y" * 6000)  # more than the model's context
    assert_sound(made)
    made.send("And now?")
    assert_sound(made)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("callback", ["on_text", "read_message"])
def test_a_callback_that_raises_leaves_no_half_reply_behind(kind, callback):
    made = opened(TransformersEngine(chat_model(kind)))
    made.send("Hello there.")
    made.add("And how is the sea today?")

    def fail(text):
        raise ValueError("no JSON")

    with pytest.raises(ValueError, match="no JSON"):
        made.reply(**{callback: fail})
    assert_sound(made)
    other = opened(made.engine)
    other.send("Hello there.")
    assert made.reply().text == other.send("And how is the sea today?").text
    assert_sound(made)
    assert made.cache.token_ids == other.cache.token_ids


def test_a_ratio_beyond_the_highest_is_one_short_line(engine):
    with pytest.raises(SettingsError) as caught:
        opened(engine).configure(ratio=100.0)
    assert str(caught.value) == "session: Value error, max_ratio 64 is below the ratio 100"


@pytest.mark.parametrize("data", ["null", "[]", '"x"', "{}"])
@pytest.mark.parametrize("kind", ["message", "pinned", "compacted", "saved", "truncated"])
def test_a_journal_row_that_makes_no_sense(engine, tmp_path, kind, data):
    with opened(engine, tmp_path / "s") as made:
        made.add("Hello.")
    with closing(sqlite3.connect(tmp_path / "s" / "session.db")) as database, database:
        database.execute("INSERT INTO journal (at, kind, data) VALUES ('', ?, ?)", (kind, data))
    with pytest.raises(DocumentError, match="cannot be read"):
        opened(engine, tmp_path / "s")


@pytest.mark.parametrize("settings", [{"system": "z" * 720}, {"margin": 0.9}])
def test_where_the_trigger_cannot_be_reached_the_window_is_kept(engine, settings):
    """A conversation that no compaction brings below the trigger by the margin goes on as long as it fits."""
    made = opened(engine, **settings)
    replies = [made.send(f"What happened on day {day}?") for day in range(20)]
    assert sum(len(reply.compactions) for reply in replies) >= 1
    assert max(len(reply.compactions) for reply in replies) == 1
    assert made.cache.held_positions <= 1000
    assert any("waits" in note for reply in replies for note in reply.notes)


def test_a_pinned_message_keeps_its_positions_apart_when_keys_are_moved_down():
    made = opened(TransformersEngine(chat_model(max_position_embeddings=1024)), window=600, ratio=8.0)
    made.send("Hello.")
    made.send("The secret number is 4711 and the boat is called Kittiwake.")
    made.pin(3)
    ids = made.cache.token_ids[made.memory.context.held[2].start : made.memory.context.held[2].stop]
    moves = 0
    for day in range(60):
        moves += any("moved down" in note for note in made.send(f"What happened on day {day}?").notes)
        row, held = made.message_table()[2], made.memory.context.held[2]
        assert row.entries == row.tokens == len(ids)
        assert made.cache.token_ids[held.start : held.stop] == ids
        assert_sound(made)
        for index, _ in made.cache.full_layers:
            places = made.cache.source(index, held.start, held.stop).positions
            assert places.unique().tolist() == list(range(held.start, held.stop))
    assert moves >= 3


def test_a_system_message_in_front_of_the_users_is_never_compacted():
    rule = "Never lie to the captain <|im_end|> of the ship."
    made = opened(TransformersEngine(chat_model(template=NO_SYSTEM)), system=rule)
    for day in range(6):
        made.send(f"What happened on day {day}?")
    made.compact()
    system, first = made.message_table()[:2]
    assert system.entries == system.tokens >= len(rule)
    assert first.state == "compacted"
    text = made.engine.model.tokenizer.decode(made.cache.token_ids)
    assert text.startswith(f"<|im_start|>user\n{rule}\n\nWhat happened on day 0?<|im_end|>\n")
    end = made.engine.encode("<|im_end|>", control_tokens=True)[0]
    assert end not in made.cache.token_ids[: system.tokens]  # what a message spells is no control token
    assert_sound(made)


def test_a_snapshot_of_another_moment_is_not_taken(engine, tmp_path):
    with opened(engine, tmp_path / "s") as made:
        made.send("Hello there.")
        made.memory.save()
        old = made.memory.state.latest.name
        made.send("And how is the sea today?")
    folder = tmp_path / "s" / "snapshots"
    (folder / old).replace(folder / made.memory.state.latest.name)
    with opened(engine, tmp_path / "s") as again:
        again.send("Go on.")
        assert_sound(again)
