"""`agentcompact eval` and `report`, run on a tiny model saved to a folder."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_cli import failed
from test_evaluation_runner import DOCUMENTS, document, untimed

from agentcompact.evaluation import CellResult
from agentcompact.evaluation.records import to_lines

ANSWERS = ("--metrics", "answers")


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(to_lines(DOCUMENTS))
    return path


def test_eval_and_report_of_own_documents(run, own, folder, tmp_path):
    code, out, err = run("eval", "--data", own, "-m", folder, "-s", "two_pass,streaming_llm", "-r", "2,4", "-o", "res")
    assert code == 0, err
    assert "agentcompact report res" in out
    assert "[1/12] doc 1/x full: " in err
    assert "[12/12] doc 2/x streaming_llm 4x: " in err
    assert " left" in err
    code, again, err = run(
        "eval", "--data", own, "-m", folder, "-s", "two_pass,streaming_llm", "-r", "2,4", "-o", "res"
    )
    assert code == 0
    assert "[1/" not in err  # nothing is measured again
    assert again == out
    code, out, err = run("report", "res")
    assert code == 0, err
    for name in ("report.html", "report.md", "results.csv"):
        assert (tmp_path / "res" / name).exists()
    assert "streaming_llm" in out
    code, out, err = run("report", "res", "--json", "--quiet", "--no-plots")
    assert code == 0
    assert err == ""
    assert {row["strategy"] for row in json.loads(out)} == {"full", "no_context", "two_pass", "streaming_llm"}


def test_eval_of_a_task_as_json(run, folder, tmp_path):
    arguments = ("eval", "-t", "records,needles", "-m", folder, "-s", "streaming_llm", "-r", 4, "-n", 1, *ANSWERS)
    code, out, err = run(*arguments, "--lengths", "200,300", "--json", "--quiet")
    assert code == 0, err
    assert err == ""
    cells = json.loads(out)
    assert [cell["length"] for cell in cells] == [200] * 3 + [300] * 3 + [200] * 3 + [300] * 3
    assert [cell["task"] for cell in cells] == ["records"] * 6 + ["needles"] * 6
    assert all(cell["length"] - 60 <= cell["tokens"] <= cell["length"] + 1 for cell in cells)  # a patient has 50 words
    assert len(list((tmp_path / "results" / "documents").iterdir())) == 4
    code, out, _ = run(*arguments, "--lengths", "200", "--questions", 2, "--seed", 5, "--json", "--quiet")
    assert code == 0
    assert {len(cell["questions"]) for cell in json.loads(out)} == {2}


def test_cells_that_fail_end_with_1(run, folder, tmp_path):
    (tmp_path / "long.jsonl").write_text(to_lines([document(3, length=600)]))
    code, _, err = run("eval", "-d", "long.jsonl", "-m", folder, "-s", "two_pass", "-r", 2)
    assert code == 1
    assert "3 of 3 cells failed, the first with: " in err
    assert len(err.split("failed: ")) == 4


def test_list_of_tasks(run):
    code, out, _ = run("eval", "--list-tasks")
    assert code == 0
    for name in ("phonebook", "needles", "records", "transcript", "niah_multiquery", "vt", "cwe", "fwe", "ruler"):
        assert name in out
    code, out, _ = run("eval", "--list-tasks", "--json")
    assert {"phonebook", "fwe"} <= {each["name"] for each in json.loads(out)}


def test_what_can_be_wrong_is_said_before_a_model_is_loaded(run, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "context": "x"}\n')
    missing = ("--model", "nowhere")
    failed(run("eval", "-q", *missing), "name a --task")
    failed(run("eval", "-q", "-t", "needle", *missing), "did you mean 'needles'")
    failed(run("eval", "-q", "-d", "bad.jsonl", *missing), "bad.jsonl line 1: questions: is missing")
    failed(run("eval", "-q", "-d", "none.jsonl", *missing), "no such file: none.jsonl")
    failed(run("eval", "-q", "-t", "needles", "-s", "two_pas", *missing), "did you mean 'two_pass'")
    failed(run("eval", "-q", "-t", "needles", "-r", "0.5", *missing), "numbers of at least 1 are needed")
    failed(run("eval", "-q", "-t", "needles", "-r", "4;8", *missing), "no list of numbers")
    failed(run("eval", "-q", "-t", "needles", "--lengths", "0", *missing), "numbers of at least 1 are needed")
    failed(run("eval", "-q", "-t", "needles", "--metrics", "sped", *missing), "did you mean 'speed'")
    failed(run("eval", "-q", "-t", "needles", *missing), "nowhere")
    failed(run("eval", "-q", "-t", "needles", "-s", "two_pass:self=1", *missing), "has no setting 'self'")
    failed(run("eval", "-q", "-t", "needles", "-s", "two_pass:shortlist=" + "[" * 100_000, *missing), "shortlist=")
    assert not (tmp_path / "results").exists()
    failed(run("eval", "-q", "-t", "needles", "-o", "bad.jsonl", *missing), "bad.jsonl is a file")
    failed(run("report", "nowhere"), "holds no results")


def test_the_markdown_replaces_no_results(run, own, folder, tmp_path):
    assert run("eval", "-q", "-d", own, "-m", folder, "-s", "two_pass", "-r", "2", *ANSWERS)[0] == 0
    before = (tmp_path / "results" / "results.jsonl").read_bytes()
    for name in ("results.jsonl", "results.csv", "report.html"):
        failed(run("report", "results", "-q", "--no-plots", "--markdown", f"results/{name}"), "name another one")
    assert (tmp_path / "results" / "results.jsonl").read_bytes() == before


def test_lengths_no_task_can_make(run, folder):
    failed(run("eval", "-q", "-t", "records", "--lengths", 100_000, "-m", folder), "do not fit the model's context")
    failed(run("eval", "-q", "-t", "records", "--lengths", 10, "-m", folder), "records cannot make a document of 10")


def start(arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "agentcompact_cli", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )


def alike(a, b):
    """Equal, numbers up to what kernels may differ by from process to process."""
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, rel=1e-3, abs=1e-5)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def test_killed_at_random_moments_it_gives_the_same(run, own, folder, tmp_path):
    """SIGKILL while cells are measured and written, again and again, then an unbroken end."""
    own.write_text(to_lines([document(number, length=200) for number in range(6)]))
    arguments = ("eval", "-d", own, "-m", folder, "-s", "two_pass,high_attn,streaming_llm", "-r", "2,4,8", "-q")
    code, _, err = run(*arguments, "-o", "whole", "--json")
    assert code == 0, err
    results = tmp_path / "broken" / "results.jsonl"
    rng = random.Random(0)
    killed = 0
    for _ in range(3):
        before = results.stat().st_size if results.exists() else 0
        process = start((*arguments, "-o", "broken"), tmp_path)
        while process.poll() is None and (not results.exists() or results.stat().st_size <= before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed
    code, _, err = run(*arguments, "-o", "broken", "--json")
    assert code == 0, err
    whole, broken = ((tmp_path / name / "results.jsonl").read_text().splitlines() for name in ("whole", "broken"))
    cells = [untimed(CellResult.model_validate_json(line) for line in lines) for lines in (whole, broken)]
    for made in cells:
        for cell in made:
            cell.pop("versions")
    assert alike(cells[1], cells[0])


def test_progress_in_a_terminal(own, folder, tmp_path):
    leader, follower = pty.openpty()
    arguments = ["eval", "-d", str(own), "-m", folder, "-s", "two_pass", "-r", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agentcompact_cli", *arguments],
        cwd=tmp_path,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "OMP_NUM_THREADS": "1"},
    )
    os.close(follower)
    shown = b""
    while True:
        ready, _, _ = select.select([leader], [], [], 120)
        try:
            part = os.read(leader, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait() == 0
    text = shown.decode()
    assert "6/6" in text
    assert "doc 2/x two_pass 2x: " in text
    assert "about" in text
    assert re.search(r"\d/\d.*two_pass: ", text)  # what a compaction is at
    assert "report it: agentcompact report results" in text
