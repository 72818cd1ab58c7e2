"""`agentcompact chat` and `sessions`: piped, and the real program in a pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import sys

import pexpect
import pytest
from tiny import chat_model, saved


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return saved(chat_model(max_position_embeddings=16_384), tmp_path_factory.mktemp("chat-model"))


def test_piped_lines_are_messages_and_commands(run, folder):
    lines = ["Hello.", "", "How is the sea?", "/context", "//slash first", "/compact", "/undo", "/quit", "never read"]
    code, out, err = run(
        "chat", "-m", folder, "--session", "s", "-n", "8", "--keep", "messages:1", stdin="\n".join(lines)
    )
    assert code == 0, err
    assert "undone" in out
    assert "compacted" in out
    assert "How is the sea?" in out
    code, out, _ = run("sessions", "show", "s", "--json")
    told = json.loads(out)
    said = [message["content"] for message in told["messages"] if message["role"] == "user"]
    assert said == ["Hello.", "How is the sea?", "/slash first"]
    assert len(told["compactions"]) == 1


def test_once_as_json(run, folder):
    code, out, _ = run("chat", "-m", folder, "--once", "Hello.", "--json", "--no-save", "-n", "5")
    told = json.loads(out)
    assert code == 0
    assert told["decoded"] <= 5
    assert told["held"] == told["logical"]
    assert run("sessions", "--json")[1].strip() == "[]"


def test_a_long_conversation_says_what_it_compacts(run, folder, tmp_path):
    (tmp_path / "c.toml").write_text(
        '[session]\nwindow = 500\nstrategy = "two_pass"\nmin_span = 8\nkeep = "messages:2"\n'
    )
    lines = "\n".join(f"What happened on day {day}?" for day in range(12))
    code, out, err = run("chat", "-m", folder, "--config", "c.toml", "--session", "s", "-n", "8", stdin=lines)
    assert code == 0, err
    assert "compaction is near" in out
    assert re.search(r"\(compacted \d+ tokens with two_pass: held \d+ -> \d+, .* next words agree \d+%", out)
    code, out, _ = run("sessions")
    assert re.search(r"s .* 24 +\d+ ", out)


def test_commands(run, folder, tmp_path):
    (tmp_path / "notes.txt").write_text("The lamp was lit in May.")
    lines = [
        "/file notes.txt",
        "When was it lit?",
        "/pin 1",
        "/strategy two_pass shortlist=3",
        "/ratio 100",
        "/auto 90%",
        "/auto off",
        "/export talk.md",
        "/save copy",
        "/retry",
        "/clear",
        "/load copy",
        "/help",
    ]
    code, out, err = run("chat", "-m", folder, "--session", "s", "-n", "6", stdin="\n".join(lines))
    assert code == 0, err
    assert "notes.txt: 24 tokens" in out
    assert "strategy two_pass shortlist=3" in out
    assert "automatic compaction is off" in out
    assert "copy: 2 messages" in out
    assert "/compact [focus ...]" in out
    assert "The lamp was lit in May.\n\nWhen was it lit?" in (tmp_path / "talk.md").read_text()
    code, out, _ = run("sessions", "export", "copy")
    assert "# copy" in out
    assert run("sessions", "delete", "copy", "s")[0] == 0
    assert json.loads(run("sessions", "--json")[1]) == []


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/nothing", "no command /nothing"),
        ("/contxt", "did you mean '/context'"),
        ("/ratio x", "a number is needed"),
        ("/ratio nan", "finite number"),
        ("/pin 9", "no message 9"),
        ("/pin nan", "a number is needed"),
        ("/pin 1.5", "a number is needed"),
        ('/strategy "two_pass', "No closing quotation"),
        ("/undo", "no compaction to undo"),
        ("/compact", "nothing to compact"),
        ("/strategy two_pas", "did you mean 'two_pass'"),
        ("/file nowhere.txt", "no such file"),
        ("/load nothing", "no session nothing"),
        ("/save ../x", "no name"),
        ("/auto often", "trigger"),
    ],
)
def test_what_goes_wrong_is_one_line_and_the_chat_goes_on(run, folder, line, part):
    code, out, err = run("chat", "-m", folder, "--session", "s", "-q", "-n", "4", stdin=f"{line}\nHello.")
    assert code == 1
    assert part in err
    assert len([each for each in err.splitlines() if each.startswith("agentcompact:")]) == 1
    assert out.strip()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--session", "a/b"], "no name"),
        (["--resume"], "no session to resume"),
        (["--session", "s", "--no-save"], "exclude each other"),
        (["--trigger", "much"], "trigger"),
        (["--strategy", "x"], "strategy"),
        (["--config", "none.toml"], "no settings file"),
        (["--set", "a"], "NAME=VALUE"),
    ],
)
def test_bad_options(run, folder, arguments, part):
    code, out, err = run("chat", "-m", folder, *arguments, stdin="Hello.")
    assert (code, out) == (2, "")
    assert part in err


def test_a_session_of_another_model_is_refused(run, folder, tmp_path):
    assert run("chat", "-m", folder, "--session", "s", "-n", "4", stdin="Hello.")[0] == 0
    other = chat_model(seed=5)
    saved(other, tmp_path / "other")
    code, _, err = run("chat", "-m", "other", "--session", "s", stdin="Hello.")
    assert code == 2
    assert "was made with" in err
    assert run("chat", "--session", "s", "-n", "4", stdin="Hello again.")[0] == 0  # it knows its model


PLAIN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\r")


class Terminal:
    """The real program in a pseudo-terminal."""

    def __init__(self, folder, sessions, *arguments):
        environment = {
            **os.environ,
            "AGENTCOMPACT_SESSIONS_DIR": str(sessions),
            "TERM": "xterm",
            "OMP_NUM_THREADS": "1",
        }
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "agentcompact_cli", "chat", "-m", folder, *arguments],
            env=environment,
            encoding="utf-8",
            timeout=240,
            dimensions=(40, 140),
        )

    def until(self, pattern):
        """Read until a pattern comes; tell the program where the cursor is when it asks, as terminals do."""
        seen = ""
        while self.process.expect([pattern, "\x1b\\[6n"]):
            seen += self.process.before
            self.process.send("\x1b[1;1R")
        after = self.process.after
        return PLAIN.sub("", seen + self.process.before + (after if isinstance(after, str) else ""))

    def type(self, text):
        self.process.send(text + "\r")


@pytest.fixture
def terminals():
    """Opens terminals and leaves no program behind, also where a test fails."""
    made = []

    def opened(*arguments):
        made.append(Terminal(*arguments))
        return made[-1]

    yield opened
    for each in made:
        each.process.close(force=True)


def test_in_a_terminal(folder, tmp_path, terminals):
    sessions = tmp_path / "sessions"
    terminal = terminals(folder, sessions, "--session", "s", "-n", "24", "--keep", "messages:1", "--window", "9000")
    terminal.until("Ctrl-D leaves")
    terminal.until(">")
    terminal.type("Hello.")
    terminal.until("held")
    terminal.type("And how are you today?")
    terminal.until("held")
    terminal.type("/context")
    assert "assistant" in terminal.until("free [0-9,]+; ")
    terminal.type("/compact")
    terminal.until("compacted [0-9]+ tokens")
    terminal.type("/undo")
    terminal.until("undone")

    terminal.type("/strategy omp omp=exact")  # slow enough to be stopped
    terminal.until("strategy omp")
    (tmp_path / "long.txt").write_text("What the keeper saw that night. " * 240)
    terminal.type(f"/file {tmp_path / 'long.txt'}")
    terminal.until("goes along")
    terminal.type("Read it.")
    terminal.until("held")
    terminal.type("/compact")
    terminal.until("omp: |reference queries")
    terminal.process.sendintr()
    terminal.until("nothing has changed")

    terminal.type("/auto off")
    terminal.until("automatic compaction is off")
    terminal.until("auto off")  # the status below the next prompt
    terminal.process.sendcontrol("d")
    terminal.until(pexpect.EOF)
    terminal.process.close()
    assert terminal.process.exitstatus == 0

    again = terminals(folder, sessions, "--resume", "-n", "4000", "--window", "9000")
    again.until("6 messages so far")
    again.until(">")
    again.type("Tell me everything.")
    again.until("\\?2004l")  # the prompt has ended
    again.until("[^\r\n \x1b]{3}")
    again.process.sendintr()
    again.until(r"stopped")
    again.type("/quit")
    again.until(pexpect.EOF)
    again.process.close()
    assert again.process.exitstatus == 0


def test_a_line_that_is_no_text_is_left_out(run, folder):
    options = ("--no-save", "-q", "-n", "4", "--json")
    code, out, err = run("chat", "-m", folder, *options, stdin=b"Hello\n\xff bad\nAgain\n")
    assert code == 1
    assert out.count('"reply"') == 2
    assert "line 2 is not UTF-8" in err


def test_a_file_that_is_none(run, folder):
    code, _, err = run("chat", "-m", folder, "--no-save", "-q", "-n", "4", stdin="/file /dev/zero")
    assert code == 1
    assert "no regular file" in err
