"""Sessions on disk: resumed after a kill, undone, pruned, opened once, copied and deleted."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from tiny import chat_model

from agentcompact import SamplingSettings, TransformersEngine
from agentcompact.errors import DocumentError, InputError, OutputExistsError
from agentcompact.session import Session, SessionPolicy, read_events
from agentcompact.session.store import (
    copy_session,
    delete_session,
    read_session,
    session_folder,
    session_info,
    session_names,
    to_markdown,
)

POLICY = SessionPolicy(strategy="two_pass", window=400, min_span=8, keep=(("messages", 2),))
GREEDY = SamplingSettings(max_new_tokens=12)
LINES = [f"In chapter {number}, what did the keeper see?" for number in range(14)]


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(chat_model())


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTCOMPACT_SESSIONS_DIR", str(tmp_path))
    return tmp_path


def opened(engine, folder, policy=POLICY):
    return Session(engine, policy, folder=folder, sampling=GREEDY)


def converse(made, lines=LINES):
    """Say all lines that were not said yet."""
    said = [message.content for message in made.messages if message.role == "user"]
    if made.messages and made.messages[-1].role == "user":
        made.reply()
    for line in lines[len(said) :]:
        made.send(line)


def transcript(messages):
    return [(message.role, message.content) for message in messages]


@pytest.fixture(scope="module")
def unbroken(engine):
    with opened(engine, None) as made:
        converse(made)
        assert len(made.reports) >= 3
        return transcript(made.messages)


def test_a_closed_session_goes_on_without_reading_anything_again(engine, tmp_path, unbroken):
    with opened(engine, tmp_path / "s") as made:
        converse(made, LINES[:9])
        logits = engine.next_token_logits(made.cache.fork(), [5])
    with opened(engine, tmp_path / "s") as again:
        torch.testing.assert_close(engine.next_token_logits(again.cache.fork(), [5]), logits)
        worked = engine.counters.prefilled_tokens
        again.send(LINES[9])
        assert engine.counters.prefilled_tokens - worked < 100
        converse(again)
        assert transcript(again.messages) == unbroken


def test_killed_at_twenty_random_moments(engine, tmp_path, unbroken):
    """The session resumes, its transcript is a prefix of the unbroken one, and the next reply is produced."""
    torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
    dice, kills, folder = random.Random(7), 0, tmp_path / "s"
    for attempt in range(60):
        child = os.fork()
        if child == 0:
            try:
                with opened(engine, folder) as made:
                    converse(made)
            finally:
                os._exit(0)
        time.sleep(dice.uniform(0.02, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        if (folder / "session.db").exists():
            state = read_session_at(folder)
            assert transcript(state.messages) == unbroken[: len(state.messages)]
            if len(state.messages) == len(unbroken):  # it was through: begin anew
                folder = tmp_path / f"s{attempt}"
        if kills == 20:
            break
    assert kills == 20
    with opened(engine, folder) as made:
        before = len(made.messages)
        converse(made)
        assert len(made.messages) > before or before == len(unbroken)
        assert transcript(made.messages) == unbroken


def read_session_at(folder):
    from agentcompact.session import replay

    return replay(read_events(folder))


def test_a_second_opening_is_refused_with_the_process(engine, tmp_path):
    with opened(engine, tmp_path / "s"), pytest.raises(InputError, match=f"open in process {os.getpid()}"):
        opened(engine, tmp_path / "s")
    opened(engine, tmp_path / "s").close()


def test_undo_after_resuming(engine, tmp_path):
    with opened(engine, tmp_path / "s") as made:
        converse(made, LINES[:9])
        assert made.cache.is_compacted
        count = len(made.memory.state.compactions)
    with opened(engine, tmp_path / "s") as again:
        worked = engine.counters.prefilled_tokens
        again.undo()
        assert engine.counters.prefilled_tokens == worked
        assert len(again.memory.state.compactions) == count - 1


def test_old_snapshots_are_pruned_and_the_transcript_stays(engine, tmp_path, unbroken):
    policy = POLICY.model_copy(update={"snapshot_bytes": 1})
    with opened(engine, tmp_path / "s", policy) as made:
        converse(made)
        assert len(list((tmp_path / "s" / "snapshots").iterdir())) <= 3
        assert transcript(made.messages) == unbroken
        made.undo()
        with pytest.raises(InputError, match="snapshot_bytes"):
            made.undo()


def test_without_snapshots_a_session_is_read_again(engine, tmp_path):
    policy = POLICY.model_copy(update={"snapshot_bytes": 0})
    with opened(engine, tmp_path / "s", policy) as made:
        converse(made, LINES[:6])
        with pytest.raises(InputError, match="gone"):
            made.undo()
    with opened(engine, tmp_path / "s", policy) as again:
        assert again.cache.next_position == 0
        again.send(LINES[6])
        assert again.cache.held_positions <= 400


def test_a_damaged_snapshot_costs_reading_only(engine, tmp_path, unbroken):
    with opened(engine, tmp_path / "s") as made:
        converse(made, LINES[:9])
    for path in (tmp_path / "s" / "snapshots").iterdir():
        path.write_bytes(b"no cache")
    with opened(engine, tmp_path / "s") as again:
        assert any("read again" in note for note in again.memory.notes)
        assert again.send(LINES[9]).text
        assert transcript(again.messages)[:18] == unbroken[:18]


def test_nothing_is_ever_changed_or_deleted(engine, tmp_path):
    with opened(engine, tmp_path / "s") as made:
        made.send("One.")
        first = read_events(tmp_path / "s")
        made.edit(1, "Two.")
        made.reply()
        made.clear()
        events = read_events(tmp_path / "s")
    assert events[: len(first)] == first
    assert [event.kind for event in events] == [
        "created",
        "message",
        "message",
        "replaced",
        "message",
        "cleared",
    ]


def test_a_damaged_journal_is_said(tmp_path, root):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "session.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(DocumentError, match="journal"):
        session_info("bad")


def test_the_store(engine, root):
    with opened(engine, session_folder("harbour")) as made:
        made.send("Hello.")
        copy_session(session_folder("harbour"), "copy")
        with pytest.raises(InputError, match="open in process"):
            delete_session("harbour")
        with pytest.raises(OutputExistsError):
            copy_session(session_folder("harbour"), "copy")
    assert sorted(session_names()) == ["copy", "harbour"]
    info = session_info("harbour")
    assert (info.messages, info.compactions, info.holder) == (2, 0, None)
    assert read_session("copy").messages == read_session("harbour").messages
    assert "## user\n\nHello." in to_markdown(read_session("copy").messages, "copy")
    delete_session("copy")
    assert session_names() == ["harbour"]
    for name in ("", "../x", "a/b", ".hidden", "x" * 200):
        with pytest.raises(InputError, match="no name"):
            session_folder(name)
    with pytest.raises(DocumentError, match="no session"):
        read_session("nothing")
