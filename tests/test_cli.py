"""The command, run in this process on a tiny model saved to a folder."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from tiny import saved, tiny_model, tiny_text


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(tiny_text(120))
    return path


def failed(result, *parts, code=2):
    """Assert one clear line on stderr with these parts, nothing on stdout, and the exit code."""
    found, out, err = result
    assert found == code, err
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith(("agentcompact: ", "Error: "))]
    assert len(lines) == 1, err
    assert err.endswith(lines[0] + "\n")
    for part in parts:
        assert part in lines[0]


def test_several_documents_into_a_folder(run, folder, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(tiny_text(80, seed=ord(name)))
    code, out, err = run("compact", "a.txt", "b.txt", "-O", "kv", "-m", folder, "-r", 4, "--json")
    assert code == 0, err
    assert [facts["output"] for facts in json.loads(out)] == ["kv/a.kv", "kv/b.kv"]
    before = (tmp_path / "kv" / "a.kv").read_bytes()
    code, out, err = run("compact", "a.txt", "b.txt", "c.txt", "-O", "kv", "-m", folder, "-r", 2, "--block", 32)
    assert code == 0, err
    assert "a.txt: there already" in err
    assert "kv/c.kv" in out
    assert "kv/a.kv" not in out
    assert (tmp_path / "kv" / "a.kv").read_bytes() == before
    code, out, _ = run("inspect", "kv/c.kv", "--json")
    assert json.loads(out)["reports"][0]["blocks"] == 3
    code, out, err = run("compact", "a.txt", "-O", "kv", "-m", folder, "-r", 2, "--force", "-q")
    assert code == 0
    assert (tmp_path / "kv" / "a.kv").read_bytes() != before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("w5")
    failed(run("compact", "a.txt", "b.txt", "-q"), "2 documents need a folder")
    failed(run("compact", "a.txt", "-o", "x.kv", "-O", "kv", "-q"), "exclude each other")
    failed(run("compact", "a.txt", "other/a.txt", "-O", "kv", "-q"), "two documents would both become kv/a.kv")
    failed(run("compact", "a.txt", "-o", "y.kv", "-m", folder, "--block", 4, "-q"), "a block of 4 tokens is too small")


def test_compact_ask_inspect(run, book, folder, tmp_path):
    code, out, err = run("compact", book, "--model", folder, "--ratio", 4)
    assert code == 0, err
    assert "120 tokens, 480 entries -> 120 (4.0x)" in out
    assert "prefill" in out
    assert (tmp_path / "book.kv").exists()
    code, out, err = run("ask", "book.kv", "w5 w6", "w7", "-n", 5)
    assert code == 0, err
    assert out.splitlines()[0] == "w5 w6"
    code, one, err = run("ask", "book.kv", "w5 w6", "-n", 5, "--quiet")
    assert code == 0
    assert err == ""
    assert one.strip() == out.splitlines()[1]
    code, out, err = run("inspect", "book.kv")
    assert code == 0, err
    for part in ("attention_matching", "ridge=1e-06", "120", "llama", "sha256", "a head", "bias"):
        assert part in out


def test_json_everywhere(run, book, folder):
    code, out, _ = run("compact", book, "-m", folder, "-b", 10, "-s", "high_attn", "--set", "ridge=0.001", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["entries_after"] == 40
    assert facts["settings"]["ridge"] == 0.001
    assert facts["strategy"] == "high_attn"
    assert facts["seconds"]["total"] > 0
    code, out, _ = run("ask", "book.kv", "w5", "--json", "-n", 3)
    answers = json.loads(out)["answers"]
    assert answers[0]["question"] == "w5"
    assert answers[0]["tokens"] <= 3
    assert answers[0]["finish_reason"] in ("eos", "length", "stop")
    code, out, _ = run("inspect", "book.kv", "--json")
    facts = json.loads(out)
    assert facts["entries"] == 40
    assert facts["tokens"] == 120
    assert facts["layers"][1]["entries_per_head"] == [10, 10]
    code, out, _ = run("strategies", "--json")
    names = [each["name"] for each in json.loads(out)]
    assert {"none", "two_pass", "high_attn", "streaming_llm"} <= set(names)
    code, out, _ = run("models", "--json")
    assert json.loads(out)["models"][0]["name"] == "smollm2"


def test_lists_for_people(run):
    code, out, _ = run("strategies", "two_pass")
    assert code == 0
    assert "shortlist=5.0" in out
    assert "high_attn" not in out
    code, out, _ = run("models")
    assert code == 0
    assert "FILE.gguf" in out


def test_questions_from_a_pipe(run, book, folder):
    run("compact", book, "-m", folder)
    code, out, _ = run("ask", "book.kv", "-n", 3, stdin="w5\n\n  w6 w7  \n")
    assert code == 0
    assert "w5\n" in out
    assert "w6 w7\n" in out
    failed(run("ask", "book.kv", stdin="\n"), "no question")


def test_document_from_standard_input(run, folder, tmp_path):
    code, _, err = run("compact", "-", "-o", "in.kv", "-m", folder, stdin=tiny_text(30))
    assert code == 0, err
    assert (tmp_path / "in.kv").exists()
    failed(run("compact", "-", "-m", folder, stdin="w5"), "--output")


def test_help_texts_have_examples(run):
    for args in ([], ["compact"], ["ask"], ["inspect"], ["strategies"], ["models"]):
        code, out, _ = run(*args, "--help")
        assert code == 0
        assert "Example:" in out
        assert "  agentcompact" in out


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--ratio", "0.5"], ["ratio 0.5", "at least 1"]),
        (["--ratio", "0"], ["ratio 0"]),
        (["--ratio", "nan"], ["ratio nan"]),
        (["--ratio", "inf"], ["ratio inf"]),
        (["--budget", "0"], ["budget 0"]),
        (["--budget", "-3"], ["budget -3"]),
        (["--ratio", "4", "--budget", "10"], ["exclude each other"]),
        (["--strategy", "two_pas"], ["no strategy 'two_pas'", "did you mean 'two_pass'?"]),
        (["--set", "shortlst=3"], ["no setting 'shortlst'", "did you mean 'shortlist'?"]),
        (["--set", "shortlist=many"], ["shortlist='many'"]),
        (["--set", "shortlist"], ["NAME=VALUE"]),
        (["--model", "no/such/folder/here"], ["no/such/folder/here"]),
        (["--dtype", "float12"], ["float12", "bfloat16"]),
        (["--device", "cuda:9"], ["cuda"]),
        (["-o", "missing/book.kv"], ["missing", "does not exist"]),
    ],
)
def test_bad_usage_writes_nothing(run, book, folder, tmp_path, args, parts):
    model = [] if "--model" in args else ["--model", folder]
    result = run("compact", book, *model, *args)
    failed(result, *parts, code=1 if "missing/book.kv" in args else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_bad_documents(run, folder, tmp_path):
    files = {
        "empty.txt": (b"", ["empty"]),
        "blank.txt": (b" \n\t\n", ["empty"]),
        "latin.txt": ("ein\nschöner Tag".encode("latin-1"), ["not UTF-8", "byte 0xf6", "offset 7", "line 2"]),
        "binary.txt": (b"ab\0cd", ["no text", "offset 2"]),
        "long.txt": (tiny_text(600).encode(), ["600 tokens", "512", "shorten"]),
    }
    for name, (data, parts) in files.items():
        (tmp_path / name).write_bytes(data)
        failed(run("compact", name, "-m", folder), *parts)
    failed(run("compact", "missing.txt", "-m", folder), "no such file: missing.txt")
    failed(run("compact", tmp_path, "-m", folder), "is a folder")
    assert not list(tmp_path.glob("*.kv"))


def test_byte_order_mark_is_no_part_of_the_text(run, folder, tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + tiny_text(30).encode())
    code, out, _ = run("compact", "bom.txt", "-m", folder, "--json")
    assert code == 0
    assert json.loads(out)["tokens"] == 30


@pytest.mark.parametrize("count", [1, 3])
def test_documents_of_one_and_three_tokens(run, folder, tmp_path, count):
    (tmp_path / "short.txt").write_text(tiny_text(count))
    code, out, err = run("compact", "short.txt", "-m", folder, "--json")
    assert code == 0, err
    assert json.loads(out)["entries_after"] == 4
    assert run("ask", "short.kv", "w5", "-n", 2)[0] == 0


def test_a_budget_above_the_tokens_warns_and_keeps_all(run, book, folder):
    code, out, err = run("compact", book, "-m", folder, "--budget", 500, "--json")
    assert code == 0
    assert "warning: nothing was compacted" in err
    assert json.loads(out)["entries_after"] == 480


def test_an_existing_output_is_kept_without_force(run, book, folder, tmp_path):
    target = tmp_path / "book.kv"
    target.write_text("precious")
    failed(run("compact", book, "-m", folder), "exists already", "--force")
    assert target.read_text() == "precious"
    assert run("compact", book, "-m", folder, "--force")[0] == 0
    assert target.stat().st_size > 1000


def test_the_document_is_never_overwritten(run, book, folder, tmp_path):
    before = book.read_bytes()
    failed(run("compact", book, "-m", folder, "-o", book, "--force"), "is the document itself")
    (tmp_path / "notes.kv").write_text(tiny_text(20))
    failed(run("compact", "notes.kv", "-m", folder, "--force"), "is the document itself")
    assert book.read_bytes() == before
    assert (tmp_path / "notes.kv").read_text() == tiny_text(20)


def test_a_device_is_never_replaced(run, book, folder, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    failed(run("compact", book, "-m", folder, "-o", "pipe", "--force"), "no regular file", code=1)
    assert (tmp_path / "pipe").is_fifo()


def test_names_that_look_like_markup(run, folder, tmp_path):
    (tmp_path / "book [v2] [bold].txt").write_text(tiny_text(40))
    code, out, err = run("compact", "book [v2] [bold].txt", "-m", folder)
    assert code == 0, err
    assert out.count("book [v2] [bold].kv") == 2
    code, out, _ = run("inspect", "book [v2] [bold].kv")
    assert "book [v2] [bold].txt" in out


def test_a_terminal_without_unicode(book, folder, tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    command = [sys.executable, "-m", "agentcompact_cli"]
    for args in (["compact", str(book), "-m", folder, "-q"], ["inspect", "book.kv"]):
        made = subprocess.run(
            [*command, *args], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr
        assert "Traceback" not in made.stderr


def test_questions_that_are_no_text(run, book, folder, tmp_path):
    run("compact", book, "-m", folder)
    failed(run("ask", "book.kv", "w5", "\udcff"), "is not UTF-8")
    failed(run("ask", "book.kv", stdin=b"w5\nw\xf6\n"), "standard input is not UTF-8", "byte 0xf6", "line 2")
    failed(run("ask", "book.kv", "w5", "--stop", ""), "stop")


def test_one_question_that_does_not_fit_is_told_before_any_is_answered(run, book, folder):
    run("compact", book, "-m", folder)
    failed(run("ask", "book.kv", "w5", tiny_text(500), "-n", 3), "question 2:", "512")


def test_a_model_path_with_an_at_sign(run, book, tmp_path):
    path = tmp_path / "me@home"
    model = tiny_model("llama")
    saved(model, path)
    assert run("compact", book, "-m", "me@home")[0] == 0
    code, _, err = run("ask", "book.kv", "w5", "-n", 2)
    assert code == 0, err


def test_a_float16_cache_is_asked_in_float16(run, book, folder):
    assert run("compact", book, "-m", folder, "--dtype", "float16")[0] == 0
    code, _, err = run("ask", "book.kv", "w5", "-n", 2)
    assert code == 0, err
    failed(run("ask", "book.kv", "w5", "--dtype", "float32"), "in float16", "--dtype")


def test_models_that_cannot_be_compacted_are_refused_before_the_prefill(run, book, tmp_path):
    model = tiny_model("mistral", sliding_window=16)
    saved(model, tmp_path / "m")
    result = run("compact", book, "-m", "m")
    assert "prefill" not in result[2]
    failed(result, "mistral", "nothing to compact")


def test_closed_and_full_streams(run, book, folder, tmp_path):
    run("compact", book, "-m", folder)
    program = f"{sys.executable} -m agentcompact_cli"
    for line, code in (
        (f"{program} ask book.kv -q <&-", 2),
        (f"{program} compact - -o x.kv -m {folder} -q <&-", 2),
        (f"{program} ask book.kv w5 -n 2 -q >&-", 0),
        (f"{program} strategies > /dev/full", 1),
        (f"{program} inspect book.kv 2>&-", 0),
    ):
        made = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert made.returncode == code, (line, made.stderr)
        assert "Traceback" not in made.stderr, line
        assert "Exception" not in made.stderr, line


def test_damaged_and_foreign_cache_files(run, book, folder, tmp_path):
    run("compact", book, "-m", folder)
    data = (tmp_path / "book.kv").read_bytes()
    (tmp_path / "short.kv").write_bytes(data[:-10])
    (tmp_path / "flip.kv").write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    (tmp_path / "text.kv").write_text("no cache at all, just text")
    for args in (["ask"], ["inspect"]):
        more = ["w5"] if args == ["ask"] else []
        failed(run(*args, "short.kv", *more), "short.kv is truncated")
        failed(run(*args, "flip.kv", *more), "flip.kv is damaged")
        failed(run(*args, "text.kv", *more), "text.kv is not a cache file")
        failed(run(*args, "none.kv", *more), "no such file")
    other = tmp_path / "other"
    model = tiny_model("llama", seed=5)
    saved(model, other)
    failed(run("ask", "book.kv", "w5", "-m", other), "another model")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--max-new-tokens", "0"], ["max_new_tokens=0"]),
        (["--temperature", "-1"], ["temperature=-1"]),
        (["--temperature", "nan"], ["temperature=nan"]),
        (["--top-p", "0"], ["top_p=0"]),
        (["--top-k", "-1"], ["top_k=-1"]),
        (["--max-new-tokens", "5000"], ["do not fit", "512"]),
    ],
)
def test_bad_sampling(run, book, folder, args, parts):
    run("compact", book, "-m", folder)
    failed(run("ask", "book.kv", "w5", *args), *parts)


def test_empty_question(run, book, folder):
    run("compact", book, "-m", folder)
    failed(run("ask", "book.kv", "  "), "a question is empty")


def test_unknown_command_and_option(run):
    code, _, err = run("compcat", "x")
    assert code == 2
    assert "did you mean 'compact'?" in err
    code, _, err = run("compact", "x", "--rato", "3")
    assert code == 2
    assert "--ratio" in err


def test_sampling_is_seeded(run, book, folder):
    run("compact", book, "-m", folder)
    ask = ["ask", "book.kv", "w5", "-n", 12, "-t", 1.5]
    first, again, other = run(*ask, "--seed", 1)[1], run(*ask, "--seed", 1)[1], run(*ask, "--seed", 2)[1]
    assert first == again
    assert first != other


def spawn(tmp_path, *args):
    """Start the real program in a pseudo-terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentcompact_cli", *map(str, args)],
        stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(slave)
    return process, master


def read_until(master, pattern, seconds=90.0):
    """Read the terminal until a pattern appears (or the program ends); return all that was read."""
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end and not re.search(pattern, text):
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        text += data.decode(errors="replace")
    return text


def test_interactive_questions_in_a_terminal(run, book, folder, tmp_path):
    run("compact", book, "-m", folder)
    process, master = spawn(tmp_path, "ask", "book.kv", "-n", 4)
    try:
        assert "Questions about book.txt (120 tokens, attention_matching 8.0x)" in read_until(master, r"> $")
        os.write(master, b"w5 w6\n")
        assert re.search(r"w\d+", read_until(master, r"\n.*> $"))
        os.write(master, b"\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_file(folder, book, tmp_path, number):
    """Interrupted while it starts, loads or works: one line, exit code 130, no file."""
    for pattern in ("starting", "prefill|reading|loading|attention_matching"):
        process, master = spawn(tmp_path, "compact", book, "-m", folder)
        try:
            read_until(master, pattern)
            os.killpg(process.pid, number)
            rest = read_until(master, "$never")
            code = process.wait(30)
            if code != 0:  # it may have been done already
                assert code == 130
                assert "interrupted" in rest
                assert "Traceback" not in rest
                assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]
            (tmp_path / "book.kv").unlink(missing_ok=True)
        finally:
            process.kill()
            os.close(master)


def test_progress_in_a_terminal(folder, book, tmp_path):
    process, master = spawn(tmp_path, "compact", book, "-m", folder)
    try:
        text = read_until(master, "ask it")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
    for phase in ("prefill", "attention_matching: scores", "writing"):
        assert phase in text


def test_a_focus_that_changes_nothing_is_told(run, book, folder):
    code, _, err = run("compact", book, "-m", folder, "-s", "two_pass", "--focus", "the harbour", "-o", "a.kv")
    assert code == 0
    assert "the focus changed nothing" in " ".join(err.split())
    study = ("--set", "queries=self_study", "--set", "study_prompts=2", "--set", "study_tokens=2")
    code, _, err = run("compact", book, "-m", folder, *study, "--focus", "the harbour", "-o", "b.kv")
    assert code == 0
    assert "focus" not in err
