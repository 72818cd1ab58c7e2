"""Checkpoints of `ttt`: after Ctrl-C, after a kill, and through the command; the cache is that of an unbroken run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import TransformersEngine, compact, compact_many
from agentcompact.cache import CompactedCache, read_header
from agentcompact.errors import CacheFileError, SettingsError, WriteError
from agentcompact.evaluation import Document, EvaluationPlan, Question, choose_strategies, evaluate
from agentcompact.strategies import CompactionRequest, latent_training
from agentcompact.strategies.latent_state import TrainingState, interrupts_deferred
from agentcompact.strategies.ttt import LatentCompaction
from agentcompact_cli import main as command

SETTINGS = {"prompts": 10, "answer_tokens": 6, "stage1_updates": 20, "stage2_updates": 12, "checkpoint_every": 1}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def setting(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTCOMPACT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(latent_training, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"))


@pytest.fixture(scope="module")
def cache(engine):
    return engine.prefill(tiny_tokens(60))


def run(engine, cache, checkpoint=None, progress=None, budget=12, seed=0, resume=True, **settings):
    method = LatentCompaction(**{**SETTINGS, **settings})
    request = CompactionRequest(
        engine, cache, budget, seed=seed, progress=progress, checkpoint=checkpoint, resume=resume
    )
    return method.compact(request)


def tensors(made):
    return [part for _, layer in made.full_layers for part in (layer.span.keys, layer.span.values, layer.span.bias)]


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def stop_at(stage, update):
    def progress(phase, done, total):
        if phase.startswith(stage) and done == update:
            signal.raise_signal(signal.SIGINT)

    return progress


@pytest.mark.parametrize(("stage", "update"), [("stage 1", 7), ("stage 1", 20), ("stage 1", 33), ("stage 2", 5)])
@pytest.mark.parametrize("every", [1, 1000])
def test_ctrl_c_leaves_a_checkpoint_that_goes_on_exactly(engine, cache, tmp_path, stage, update, every):
    whole = run(engine, cache)
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        run(engine, cache, path, stop_at(stage, update), checkpoint_every=every)
    told = []
    result = run(engine, cache, path, lambda *facts: told.append(facts), checkpoint_every=every)
    assert_same(whole.cache, result.cache)
    assert result.report.training["losses"] == whole.report.training["losses"]
    steps = [phase for phase, _, _ in told if phase.startswith("stage ")]
    done = update if stage == "stage 1" else 40 + update
    assert len(steps) == 2 * 20 + 12 - done
    assert not [phase for phase, _, _ in told if phase.startswith("rollouts")]


def test_a_finished_checkpoint_needs_no_more_updates(engine, cache, tmp_path):
    path = tmp_path / "c"
    first, told = run(engine, cache, path), []
    assert_same(first.cache, run(engine, cache, path, lambda *facts: told.append(facts)).cache)
    assert not [phase for phase, _, _ in told if phase.startswith("stage ")]
    assert path.stat().st_mode & 0o077 == 0
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["agentcompact_checkpoint"])["stage"] == "done"


def test_seconds_of_all_runs_are_reported(engine, cache, tmp_path):
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        run(engine, cache, path, stop_at("stage 2", 5))
    with safe_open(path, framework="pt") as file:
        kept = json.loads(file.metadata()["agentcompact_checkpoint"])["seconds"]
    found = run(engine, cache, path).report.seconds
    assert kept["stage 1"] > 0
    assert found["stage 1"] == pytest.approx(kept["stage 1"])
    assert found["stage 2"] > kept["stage 2"] > 0


@pytest.mark.parametrize(
    "changed", [{"budget": 11}, {"seed": 1}, {"stage1_rate": 1e-3}, {"prompts": 9}, {"stage2_updates": 13}]
)
def test_another_compactions_checkpoint_is_refused(engine, cache, tmp_path, changed):
    run(engine, cache, tmp_path / "c", stage1_updates=2, stage2_updates=1)
    with pytest.raises(CacheFileError, match="another compaction"):
        run(engine, cache, tmp_path / "c", **{"stage1_updates": 2, "stage2_updates": 1, **changed})
    run(engine, cache, tmp_path / "c", stage1_updates=2, stage2_updates=1, checkpoint_every=7, memory_gib=100.0)


def test_checkpoints_that_cannot_be_used(engine, cache, tmp_path):
    path = tmp_path / "c"
    run(engine, cache, path, stage1_updates=2, stage2_updates=1)
    with pytest.raises(CacheFileError, match="go on with --resume"):
        run(engine, cache, path, resume=False)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CacheFileError, match="no checkpoint that can be read"):
        run(engine, cache, path)
    cache_file = compact(engine, tiny_text(30), "streaming_llm", ratio=2).save(tmp_path / "x.kv")
    with pytest.raises(CacheFileError, match="no checkpoint of a latent compaction"):
        run(engine, cache, cache_file)


def test_only_resumable_strategies_take_a_checkpoint(engine, tmp_path):
    with pytest.raises(SettingsError, match="'streaming_llm' keeps no checkpoints"):
        compact(engine, tiny_text(30), "streaming_llm", checkpoint=tmp_path / "c")
    with pytest.raises(SettingsError, match="in blocks keeps no checkpoints"):
        compact(engine, tiny_text(30), LatentCompaction(**SETTINGS), block=16, checkpoint=tmp_path / "c")
    with pytest.raises(SettingsError, match="cannot share one checkpoint"):
        compact_many(engine, ["w5", "w6"], LatentCompaction(**SETTINGS), checkpoint=tmp_path / "c")


def test_a_second_ctrl_c_ends_at_once():
    with interrupts_deferred() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


WORKER = """
import sys
sys.path[:0] = [{tests!r}]
import torch
from tiny import tiny_model, tiny_text
from agentcompact import TransformersEngine, compact
from agentcompact.strategies import latent_training
from agentcompact.strategies.ttt import LatentCompaction
latent_training.CHECKPOINT_SECONDS = 0.0
def told(phase, done, total):
    print(phase, done, flush=True)
compact(TransformersEngine(tiny_model("llama")), tiny_text(60), LatentCompaction(**{settings!r}), budget=12,
        checkpoint={name!r}, resume=True, progress=told).save({name!r} + ".kv")
"""


def worker(tmp_path, name="broken", **settings):
    script = tmp_path / f"{name}.py"
    script.write_text(WORKER.format(tests=str(Path(__file__).parent), settings={**SETTINGS, **settings}, name=name))
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)


def kill_at(process, start):
    """Kill a worker at the first line that begins so; return whether there was one."""
    for line in process.stdout:
        if line.startswith(start):
            time.sleep(0.02)  # somewhere within an update, or while a checkpoint is written
            process.kill()
            process.wait()
            return True
    return False


def test_after_a_kill_the_cache_is_that_of_an_unbroken_run(tmp_path):
    """SIGKILL in stage 1 and in stage 2; every run in a process of its own, since these are alike in their threads."""
    for start in ("stage 1", "stage 2"):
        assert kill_at(worker(tmp_path), start)
        assert (tmp_path / "broken").exists()
    told, _ = worker(tmp_path).communicate()
    assert "stage 2" in told
    assert "stage 1" not in told
    told, _ = worker(tmp_path, "whole", keep_rollouts=False).communicate()
    assert "stage 1" in told
    model = tiny_model("llama")
    assert_same(*(CompactedCache.load(tmp_path / f"{name}.kv", model) for name in ("whole", "broken")))


# Through the command


@pytest.fixture
def call(run, folder):
    pairs = [f"{name}={value}" for name, value in SETTINGS.items()]
    options = [option for pair in pairs for option in ("--set", pair)]

    def compact_with(*args):
        return run("compact", *args, "-m", folder, "-b", "12", "--strategy", "ttt", "--set", "preset=fast", *options)

    return compact_with


def test_the_command_trains_and_says_so(call, tmp_path):
    (tmp_path / "book.txt").write_text(tiny_text(60))
    code, out, err = call("book.txt")
    assert code == 0, err
    assert "stage 1 (40)" in err
    assert "the paper's schedule" in err
    assert "loss " in err
    assert "left" in err
    assert "stage 1: loss " in out
    assert "stage 2: loss " in out
    report = read_header(tmp_path / "book.kv").metadata.reports[-1]
    assert report.settings["preset"] == "fast"
    assert report.training["prompts"] == 10
    assert not (tmp_path / "book.kv.checkpoint").exists()


def test_the_command_resumes_where_it_was_interrupted(call, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(tiny_text(60))
    code, _, err = call("book.txt", "-o", "whole.kv")
    assert code == 0, err
    steps = iter(range(1000))
    with monkeypatch.context() as patch:
        tell = latent_training.Clock.tell

        def interrupting(self, loss):
            tell(self, loss)
            if next(steps) == 25:
                signal.raise_signal(signal.SIGINT)

        patch.setattr(latent_training.Clock, "tell", interrupting)
        code, _, err = call("book.txt", "-o", "broken.kv")
    assert code == 130
    assert "go on with --resume" in err
    assert (tmp_path / "broken.kv.checkpoint").exists()
    assert not (tmp_path / "broken.kv").exists()
    code, _, err = call("book.txt", "-o", "broken.kv")
    assert code == 2
    assert "add --resume to go on, or --force to begin again" in err
    code, _, err = call("book.txt", "-o", "broken.kv", "--resume")
    assert code == 0, err
    assert not (tmp_path / "broken.kv.checkpoint").exists()
    with safe_open("whole.kv", framework="pt") as a, safe_open("broken.kv", framework="pt") as b:
        for name in a.keys():  # noqa: SIM118
            assert torch.equal(a.get_tensor(name), b.get_tensor(name)), name


def test_many_documents_are_resumable(call, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(tiny_text(60, seed=ord(name)))
    assert call("a.txt", "-O", "kv")[0] == 0
    before = (tmp_path / "kv" / "a.kv").read_bytes()
    (tmp_path / "kv" / "b.kv.checkpoint").write_bytes(b"damaged")
    code, _, err = call("a.txt", "b.txt", "-O", "kv")
    assert code == 2
    assert "b.kv.checkpoint holds an interrupted compaction" in err
    (tmp_path / "kv" / "b.kv.checkpoint").unlink()
    code, _, err = call("a.txt", "b.txt", "-O", "kv", "--resume")
    assert code == 0, err
    assert "a.txt: there already" in err
    assert (tmp_path / "kv" / "a.kv").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["a.kv", "b.kv"]
    (tmp_path / "kv" / "b.kv.checkpoint").write_bytes(b"damaged")
    code, _, err = call("b.txt", "-O", "kv", "--force")
    assert code == 0, err
    assert not (tmp_path / "kv" / "b.kv.checkpoint").exists()


def test_resume_needs_a_strategy_that_keeps_checkpoints(call, tmp_path, monkeypatch, capsys):
    (tmp_path / "book.txt").write_text(tiny_text(60))
    code, _, err = call("book.txt", "--resume", "--block", "32")
    assert code == 2
    assert "in blocks keeps no checkpoints" in err
    monkeypatch.setattr(sys, "argv", ["agentcompact", "compact", "book.txt", "-s", "recent", "--resume", "-q"])
    assert command._run() == 2
    assert "strategy 'recent' keeps no checkpoints: leave out --resume" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["interrupted", "failed", "damaged"])
def test_an_evaluation_goes_on_within_a_cell(engine, tmp_path, monkeypatch, end):
    questions = (Question(question=tiny_text(4), answers=("w5",), max_new_tokens=3),)
    document = Document(id="one", task="own", context=tiny_text(60), questions=questions)
    settings = ":".join(f"{name}={value}" for name, value in SETTINGS.items())
    choices = choose_strategies([f"ttt:{settings}"])
    plan = EvaluationPlan(choices, [5], frozenset({"answers", "fidelity"}), retry_failed=True)
    whole = evaluate(engine, [document], plan, tmp_path / "whole")
    updates, keep = [], TrainingState.save

    def save(state, path):
        keep(state, path)
        updates.append((state.place.stage, state.place.group, state.place.update))
        if len(updates) == 25:
            raise WriteError("the disk is full") if end == "failed" else KeyboardInterrupt

    monkeypatch.setattr(TrainingState, "save", save)
    if end == "failed":
        assert evaluate(engine, [document], plan, tmp_path / "cut")[-1].status == "failed"
    else:
        with pytest.raises(KeyboardInterrupt):
            evaluate(engine, [document], plan, tmp_path / "cut")
    (kept,) = (tmp_path / "cut" / "checkpoints").rglob("*.checkpoint")
    if end == "damaged":
        kept.write_bytes(b"{}")
    resumed = evaluate(engine, [document], plan, tmp_path / "cut")
    assert (updates[25] == updates[0]) == (end == "damaged")  # it began again only where it had to
    assert not (tmp_path / "cut" / "checkpoints").exists()
    assert (resumed[-1].kl, resumed[-1].questions) == (whole[-1].kl, whole[-1].questions)
