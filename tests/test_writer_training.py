"""Training a writer: gradients, exact resumption, teacher caches, corpora, and the commands."""

from __future__ import annotations

import gzip
import json
import os
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens
from writers import tiny_corpus, tiny_training, tiny_writer

from agentcompact import TransformersEngine
from agentcompact.errors import DocumentError, InputError, TrainingError
from agentcompact.training import (
    CorpusOptions,
    Cue,
    Teacher,
    TeacherStore,
    Trainer,
    TrainingStopped,
    Window,
    build_corpus,
    cut_corpus,
    read_texts,
)
from agentcompact.training import corpus_builder as builder
from agentcompact.training.objective import attention_loss, continuation_loss, divergence, written_cache
from agentcompact.writers import WriterSettings, load_writer, read_record

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engines():
    return {kind: TransformersEngine(tiny_model(kind)) for kind in ("llama", "gemma3")}


@pytest.fixture
def engine(engines):
    return engines["llama"]


def parameters(writer):
    return {name: parameter.detach().clone() for name, parameter in writer.named_parameters()}


def assert_same(a, b):
    for name, parameter in a.items():
        assert torch.equal(parameter, b[name]), name


def teacher_of(engine, folder, attention=True):
    return Teacher(engine, TeacherStore(folder, 1 << 30), attention=attention)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("applications", [1, 3])
@pytest.mark.parametrize("attention", [False, True])
def test_gradients_reach_the_writer_and_nothing_else(engines, tmp_path, kind, applications, attention):
    engine = engines[kind]
    settings = tiny_training(applications=applications)
    corpus = tiny_corpus(engine, settings)
    teacher, window = teacher_of(engine, tmp_path), corpus.train[0]
    cue = window.cue(0, settings)
    said = teacher.cue(window, cue)
    writer, _ = tiny_writer(engine, context=24, latents=6)
    compacted = written_cache(writer, engine, teacher.context(window), applications)
    assert compacted.held_positions == 6
    assert len(window.context_ids) == compacted.next_position == 24 + (applications - 1) * 18
    loss = attention_loss(engine, compacted, said) if attention else continuation_loss(engine, compacted, cue, said)
    loss.backward()
    for name, parameter in writer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in engine.model.causal_lm.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_losses_are_what_they_say(engines, tmp_path, kind):
    """A context that is kept whole has no loss; KL is that of the distributions, over KL without the context."""
    engine, settings = engines[kind], tiny_training()
    window = tiny_corpus(engine, settings).train[0]
    cue, teacher = window.cue(0, settings), teacher_of(engine, tmp_path)
    said, context = teacher.cue(window, cue), teacher.context(window)
    with torch.no_grad():
        assert float(continuation_loss(engine, context.fork(), cue, said)) == pytest.approx(0, abs=1e-4)
        assert float(attention_loss(engine, context, said)) < 1e-3  # kept in bfloat16
        writer, _ = tiny_writer(engine, context=24, latents=6)
        compacted = written_cache(writer, engine, context)
        full, small, nothing = (
            engine.next_token_logits(cache.fork(), cue.ids[:-1])[-cue.continuation :]
            for cache in (context, compacted, engine.new_cache())
        )
        expected = divergence(full, small) / divergence(full, nothing)
        torch.testing.assert_close(continuation_loss(engine, compacted, cue, said), expected, rtol=1e-2, atol=1e-4)


def trainer(engine, folder, corpus=None, **changes):
    settings = tiny_training(**changes)
    return Trainer(engine, corpus or tiny_corpus(engine, settings), settings, folder)


class StopAfter:
    """Asks for the end as SIGTERM would, when it has been told of so many updates."""

    def __init__(self, updates):
        self.updates = updates

    def __call__(self, step):
        if step.update == self.updates:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_interrupted_and_resumed_is_as_unbroken(engine, tmp_path, stop):
    unbroken = trainer(engine, tmp_path / "a")
    unbroken.run()
    broken = trainer(engine, tmp_path / "b")
    broken.report = StopAfter(stop)
    with pytest.raises(TrainingStopped, match=f"stopped after {stop} of 9 updates"):
        broken.run()
    resumed = trainer(engine, tmp_path / "b")
    assert resumed.update == stop
    resumed.run()
    assert_same(parameters(unbroken.writer), parameters(resumed.writer))
    assert [entry["loss"] for entry in unbroken.log] == [entry["loss"] for entry in resumed.log]
    assert [entry.get("held_out") for entry in unbroken.log] == [entry.get("held_out") for entry in resumed.log]
    (one, known), (other, also_known) = (load_writer(tmp_path / folder) for folder in "ab")
    assert known == also_known
    assert_same(parameters(one), parameters(other))


def test_killed_between_checkpoints(engine, tmp_path):
    """What was done since the last checkpoint is done again, the same."""

    def fail(step):
        if step.update == 5:
            raise KeyboardInterrupt

    unbroken = trainer(engine, tmp_path / "a")
    unbroken.run()
    killed = trainer(engine, tmp_path / "b")
    killed.report = fail
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    resumed = trainer(engine, tmp_path / "b")
    assert resumed.update == 4
    resumed.run()
    assert_same(parameters(unbroken.writer), parameters(resumed.writer))


def test_training_lowers_the_loss(engine, tmp_path):
    made = trainer(
        engine, tmp_path, updates=40, attention_updates=40, attention_accumulate=2, cues=1, learning_rate=5e-3
    )
    made.run()
    for phase in ("attention", "continuation"):
        losses = [entry["loss"] for entry in made.log if entry["phase"] == phase]
        assert sum(losses[-10:]) < 0.97 * sum(losses[:10])


def test_what_a_run_leaves(engine, tmp_path):
    steps = []
    made = trainer(engine, tmp_path)
    made.report = steps.append
    path = made.run()
    assert [step.update for step in steps] == list(range(1, 10))
    assert steps[-1].seconds_left == 0
    assert all(step.tokens_per_second > 0 for step in steps)
    _, record = load_writer(path)
    assert record.training["updates"] == 9
    assert record.training["held_out"] == made.held_out is not None
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["phase"] for entry in log] == ["attention"] * 3 + ["continuation"] * 6
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_another_run_in_the_same_folder(engine, tmp_path):
    trainer(engine, tmp_path).run()
    with pytest.raises(TrainingError, match=r"another learning_rate \(0.0003, not 0.1\): give the same again"):
        trainer(engine, tmp_path, learning_rate=0.1)
    with pytest.raises(TrainingError, match="another corpus"):
        trainer(engine, tmp_path, tiny_corpus(engine, tiny_training(), documents=4))
    with pytest.raises(TrainingError, match="another model"):
        trainer(TransformersEngine(tiny_model("llama", seed=5)), tmp_path)
    checkpoint = tmp_path / "checkpoint.safetensors"
    data = checkpoint.read_bytes()
    for damaged in (data[:100], data[:-4] + b"abcd"):
        checkpoint.write_bytes(damaged)
        with pytest.raises(TrainingError, match="damaged"):
            trainer(engine, tmp_path)


def test_going_on_with_a_trained_writer(engine, tmp_path):
    first = trainer(engine, tmp_path / "a")
    path = first.run()
    settings = tiny_training(attention_updates=0, applications=2)
    corpus = tiny_corpus(engine, settings)
    second = Trainer(engine, corpus, settings, tmp_path / "b", start_from=path)
    read, _ = load_writer(path)
    assert_same(parameters(second.writer), parameters(read))
    second.run()
    assert not torch.equal(second.writer.key, read.key)
    with pytest.raises(TrainingError, match="another start"):
        Trainer(engine, corpus, settings, tmp_path / "b")
    other = tiny_training(writer=WriterSettings(context=24, latents=4))
    corpus = tiny_corpus(engine, other)
    with pytest.raises(TrainingError, match="cannot be gone on with"):
        Trainer(engine, corpus, other, tmp_path / "c", start_from=path)


def test_a_run_that_goes_on_from_another_takes_its_moments_over(engine, tmp_path):
    first = trainer(engine, tmp_path / "a", updates=4, attention_updates=0)
    first.run()
    settings = tiny_training(updates=3, attention_updates=0)
    corpus = tiny_corpus(engine, settings)
    second = Trainer(engine, corpus, settings, tmp_path / "b", start_from=tmp_path / "a")
    assert_same(parameters(second.writer), parameters(first.writer))  # in float32, not as its file has them
    for mine, theirs in zip(second.writer.parameters(), first.writer.parameters(), strict=True):
        assert torch.equal(second.optimiser.state[mine]["exp_avg"], first.optimiser.state[theirs]["exp_avg"])
        assert int(second.optimiser.state[mine]["step"]) == 4
    path = second.run()
    assert int(next(iter(second.optimiser.state.values()))["step"]) == 7
    assert read_record(path).training["before"]["updates"] == 4
    checkpoint = tmp_path / "a" / "checkpoint.safetensors"
    checkpoint.write_bytes(b"{}")
    with pytest.raises(TrainingError, match="damaged"):
        Trainer(engine, corpus, settings, tmp_path / "c", start_from=tmp_path / "a")
    other = trainer(
        engine, tmp_path / "d", updates=1, attention_updates=0, writer=WriterSettings(context=24, latents=4)
    )
    other.run()
    checkpoint.write_bytes((tmp_path / "d" / "checkpoint.safetensors").read_bytes())
    with pytest.raises(TrainingError, match="another model or writer"):
        Trainer(engine, corpus, settings, tmp_path / "e", start_from=tmp_path / "a")


def test_moments_of_another_loss_are_left(engine, tmp_path):
    first = trainer(engine, tmp_path / "a", updates=2, attention_updates=2)
    first.update = first.settings.attention_updates - 1
    first._one_update(lambda: False)
    first._save()
    settings = tiny_training(updates=3, attention_updates=0)
    second = Trainer(engine, tiny_corpus(engine, settings), settings, tmp_path / "b", start_from=tmp_path / "a")
    assert not second.optimiser.state
    settings = tiny_training(updates=3, attention_updates=2)
    third = Trainer(engine, tiny_corpus(engine, settings), settings, tmp_path / "c", start_from=tmp_path / "a")
    assert not third.optimiser.state


def test_the_learning_rate_rises_and_falls(engine, tmp_path):
    made = trainer(engine, tmp_path, updates=100, attention_updates=50, warmup=10, learning_rate=1.0, floor=0.1)
    rates = [made._learning_rate(update) for update in range(150)]
    assert rates[50] == pytest.approx(0.1)
    assert rates[59] == rates[60] == pytest.approx(1.0)
    assert rates[149] == pytest.approx(0.1, abs=0.01)
    assert max(rates[:50]) == pytest.approx(made.settings.attention_learning_rate)


def test_teacher_caches_are_made_once_and_stay_within_the_limit(engine, tmp_path):
    settings = tiny_training()
    window = tiny_corpus(engine, settings).train[0]
    cue = window.cue(0, settings)
    first = teacher_of(engine, tmp_path / "a")
    said = first.cue(window, cue)
    read = engine.counters.prefilled_tokens
    again = teacher_of(engine, tmp_path / "a").cue(window, cue)
    assert engine.counters.prefilled_tokens == read
    small = Teacher(engine, TeacherStore(tmp_path / "b", 1000), attention=True)
    anew = small.cue(window, cue)
    assert list((tmp_path / "b").iterdir()) == []
    for name, tensor in said.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, anew[name])
    next((tmp_path / "a").glob("context-*")).write_bytes(b"cut off")
    assert teacher_of(engine, tmp_path / "a").context(window).next_position == 24


def test_windows_and_cues(engine):
    settings = tiny_training(windows=2, beyond=12)
    corpus = tiny_corpus(engine, settings)
    assert len({w.document for w in corpus.held_out} | {w.document for w in corpus.train}) == 6
    assert not {w.document for w in corpus.held_out} & {w.document for w in corpus.train}
    assert len(corpus.held_out) == 2
    ids = tiny_tokens(90, 0)
    for window in (*corpus.train, *corpus.held_out):
        assert len(window.ids) == 36
        assert len(window.context_ids) == 24
        assert window.cue(1, settings) == window.cue(1, settings)
        starts = set()
        for number in range(200):
            cue = window.cue(number, settings)
            assert isinstance(cue, Cue)
            starts.add(next(i for i in range(27) if window.ids[i : i + 10] == cue.ids))
        assert starts == set(range(27))  # anywhere, the context included
    assert Window("x", ids, 24).cue(0, settings) != Window("x", ids, 24).cue(0, tiny_training(seed=1))


def test_corpora_that_cannot_be_used(engine, tmp_path):
    with pytest.raises(TrainingError, match="there is no corpus"):
        read_texts(tmp_path / "nothing")
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(TrainingError, match="at least two"):
        read_texts(tmp_path)
    for line in ("[1]", '{"no": "text"}', "{", '{"text": 3}', "5"):
        (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n' + line)
        with pytest.raises(TrainingError, match="line 2"):
            read_texts(tmp_path / "c.jsonl")
    with pytest.raises(TrainingError, match="0 of 2 documents have the 34 tokens"):
        cut_corpus([("a", "w3"), ("b", "w4")], engine.encode, tiny_training())


PROSE = "This is what they said of the house and of all that was in it, and we do not know who it was for. "


def test_a_corpus_of_folders(tmp_path):
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "a.txt").write_text("First. " + PROSE * 80)
    (texts / "deep" / "page.html").write_text(f"<html><script>var x</script><p>Second. {PROSE * 80}</p></html>")
    (texts / "b.md.gz").write_bytes(gzip.compress(("Third. " + PROSE * 80).encode()))
    (texts / "same.txt").write_text("First. " + PROSE * 80)
    (texts / "short.txt").write_text(PROSE)
    (texts / "numbers.txt").write_text("12 34 56 " * 2000)
    (texts / "LICENSE.txt").write_text("Fourth. " + PROSE * 80)
    (texts / "latin.txt").write_bytes(b"\xe9" * 9000)
    counts = build_corpus(tmp_path / "c.jsonl", folders=[texts], options=CorpusOptions(largest=7000))
    assert counts == {str(texts): 3}
    records = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert sorted(record["text"][:7] for record in records) == ["First. ", "Second.", "Third. "]
    assert all(len(record["text"]) == 7000 and "var x" not in record["text"] for record in records)
    assert len(read_texts(tmp_path / "c.jsonl")) == 3
    few = build_corpus(tmp_path / "d.jsonl", folders=[texts], options=CorpusOptions(per_source=2))
    assert sum(few.values()) == 2


def test_a_corpus_of_packages(tmp_path, monkeypatch):
    def call(command, folder, name):
        if command[0] == "apt-get":
            (folder / "x.deb").write_bytes(b"")
        elif command[0] == "dpkg-deb":
            (folder / "files").mkdir()
            (folder / "files" / "a.txt").write_text(PROSE * 80)
        else:
            with zipfile.ZipFile(folder / "x.whl", "w") as archive:
                archive.writestr("b.rst", "Another. " + PROSE * 80)

    monkeypatch.setattr(builder, "_call", call)
    counts = build_corpus(tmp_path / "c.jsonl", debian=["some-doc"], pypi=["some.docs"])
    assert counts == {"some-doc": 1, "some.docs": 1}
    with pytest.raises(InputError, match="is no package name"):
        build_corpus(tmp_path / "d.jsonl", debian=["--option"])


def test_corpora_that_cannot_be_made(tmp_path):
    with pytest.raises(InputError, match="needs a source"):
        build_corpus(tmp_path / "c.jsonl")
    with pytest.raises(InputError, match="is no folder"):
        build_corpus(tmp_path / "c.jsonl", folders=[tmp_path / "nothing"])
    with pytest.raises(DocumentError, match="no text"):
        build_corpus(tmp_path / "c.jsonl", folders=[tmp_path])
    assert not (tmp_path / "c.jsonl").exists()


def test_the_commands(engine, tmp_path, run):
    loaded = engine.model
    loaded.causal_lm.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(tiny_text(60, number))
    small = ("accumulate=1", "warmup=1", "cue=4", "continuation=6", "held_out_examples=1", "share_latents=layer")
    arguments = ["train-writer", "--model", "model", "--corpus", "texts", "-o", "writer", "--context", 24]
    arguments += ["--latents", 6, "--updates", 3, *(part for each in small for part in ("--set", each)), "--json"]
    code, out, err = run(*arguments)
    assert code == 0, err
    facts = json.loads(out)
    assert facts["updates"] == 3
    assert "[3/3] continuation: loss" in err
    _, record = load_writer(tmp_path / "writer")
    assert record.settings == WriterSettings(context=24, latents=6, share_latents="layer")
    assert run(*arguments, "-q")[0] == 0  # there is nothing left to do
    (tmp_path / "book.txt").write_text(tiny_text(48, 9))
    use = ("compact", "book.txt", "--model", "model", "--strategy", "fast_diamond", "--writer", "writer", "-r", 4, "-q")
    assert run(*use)[0] == 0
    assert Path("book.kv").exists()

    for wrong, said in (
        (("--set", "no_such=1"), "no setting 'no_such'"),
        (("--set", "clip=7"), "another clip (1.0, not 7.0)"),
        (("--latents", 0), "latents=0"),
        (("--corpus", "nothing"), "there is no corpus at nothing"),
        (("--context", 500), "have the 510 tokens"),
    ):
        code, _, err = run(*arguments, *wrong, "-q")
        assert code == 2
        assert said in err
        assert len(err.strip().splitlines()) == 1

    code, out, err = run("build-corpus", "--folder", "texts", "-o", "corpus.jsonl", "-q")
    assert code == 2
    assert "no text of 6,000 characters" in err
    (texts / "long.txt").write_text(PROSE * 80)
    code, out, err = run("build-corpus", "--folder", "texts", "-o", "corpus.jsonl", "-q", "--json")
    assert code == 0, err
    assert json.loads(out)["documents"] == {"texts": 1}
