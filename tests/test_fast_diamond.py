"""The strategy fast_diamond: budgets, any length, rolling use, writers that do not fit, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import chat_model, saved, tiny_model, tiny_text, tiny_tokens
from writers import tiny_writer, tiny_writer_file

from agentcompact import TransformersEngine, compact, make_strategy, recompact
from agentcompact.errors import BudgetError, WriterFileError
from agentcompact.session import Session, SessionPolicy
from agentcompact.settings import SamplingSettings
from agentcompact.strategies import compact_in_blocks
from agentcompact.writers import WriterRecord, load_writer, save_writer, write_span

KINDS = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def engines():
    return {kind: TransformersEngine(tiny_model(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def writers(engines, tmp_path_factory):
    return {kind: tiny_writer_file(engine, tmp_path_factory.mktemp(kind)) for kind, engine in engines.items()}


@pytest.mark.parametrize("ratio", [1, 2, 50])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_budget_positions_and_the_next_forward(engines, writers, kind, count, ratio):
    engine = engines[kind]
    new = recompact(engine, engine.prefill(tiny_tokens(count)), "fast_diamond", ratio=ratio, writer=writers[kind])
    wanted = max(1, math.ceil(count / ratio))
    assert (new.next_position, new.tail_length, new.held_positions) == (count, 0, wanted)
    for index, _ in new.full_layers:
        span = new.source(index, 0, count)
        assert span.lengths == (wanted, wanted)
        for tensor in (span.keys, span.values, span.bias):
            assert torch.isfinite(tensor).all()
        for *_, positions in span:
            assert positions.tolist() == sorted(set(positions.tolist()))
    report = new.metadata.reports[-1]
    assert report.entries_after == len(new.full_layers) * 2 * wanted == new.entries
    logits = engine.next_token_logits(new.fork(), tiny_tokens(2, seed=1))
    assert torch.isfinite(logits).all()


def test_the_cache_that_was_handed_in_stays(engines, writers):
    engine = engines["gemma3"]
    cache = engine.prefill(tiny_tokens(40))
    question = tiny_tokens(3, seed=1)
    before = engine.next_token_logits(cache.fork(), question)
    new = recompact(engine, cache, "fast_diamond", ratio=8, writer=writers["gemma3"])
    assert [index for index, _ in new.full_layers] == [1]
    assert new.layers[0].length == 15
    assert torch.equal(engine.next_token_logits(cache.fork(), question), before)


def test_long_texts_are_written_chunk_by_chunk(engines, writers):
    """Chunks of the training length come out as they would alone."""
    engine = engines["llama"]
    cache = engine.prefill(tiny_tokens(72))
    writer, _ = load_writer(Path(writers["llama"]))
    new = recompact(engine, cache, "fast_diamond", budget=24, writer=writers["llama"])
    assert new.metadata.reports[-1].warnings == []
    for place, (index, _) in enumerate(new.full_layers):
        written = new.source(index, 0, 72)
        for part in range(3):
            alone = write_span(writer, place, cache.source(index, 24 * part, 24 * part + 24), 8, engine.rotate)
            rows = slice(8 * part, 8 * part + 8)
            torch.testing.assert_close(written.dense(written.keys)[:, rows], alone.dense(alone.keys))
            torch.testing.assert_close(written.dense(written.values)[:, rows], alone.dense(alone.values))


def test_another_ratio_than_trained_is_said(engines, writers):
    cache = engines["llama"].prefill(tiny_tokens(40))
    for budget, said in ((20, "40 into 20 (2x)"), (2, "40 into 2 (20x)")):
        report = recompact(engines["llama"], cache, "fast_diamond", budget=budget, writer=writers["llama"])
        warning = report.metadata.reports[-1].warnings[0]
        assert "trained for 24 entries into 8 (3x)" in warning
        assert said in warning


def test_rolling_use_at_a_fixed_budget(engines, writers):
    """Two chunks in, one out: what was written before is read with what came since."""
    engine = engines["llama"]
    writer, _ = load_writer(Path(writers["llama"]))
    ids = tiny_tokens(24 + 3 * 16)
    cache = engine.new_cache()
    for stop in range(24, len(ids) + 1, 16):
        cache = engine.prefill(ids[cache.next_position : stop], cache)
        expected = write_span(writer, 0, cache.source(0, 0, stop), 8, engine.rotate)
        cache = recompact(engine, cache, "fast_diamond", budget=8, writer=writers["llama"])
        assert (cache.held_positions, cache.next_position) == (8, stop)
        torch.testing.assert_close(cache.source(0, 0, stop).keys, expected.keys)
    assert torch.isfinite(engine.next_token_logits(cache, tiny_tokens(3))).all()


def test_in_blocks(engines, writers):
    strategy = make_strategy("fast_diamond", writer=writers["llama"])
    cache = compact_in_blocks(strategy, engines["llama"], tiny_tokens(72), block=24, ratio=3)
    assert (cache.next_position, cache.held_positions) == (72, 24)


def test_rolling_block_by_block(engines, writers):
    engine, ids = engines["llama"], tiny_tokens(24 + 3 * 16)
    strategy = make_strategy("fast_diamond", writer=writers["llama"])
    rolled = compact_in_blocks(strategy, engine, ids, block=24, budget=8, rolling=True)
    cache = engine.new_cache()
    for start in range(0, len(ids), 24):
        cache = engine.prefill(ids[start : start + 24], cache)
        cache = recompact(engine, cache, "fast_diamond", budget=8, writer=writers["llama"])
    assert rolled.held_positions == 8
    assert torch.equal(rolled.source(1, 0, 72).keys, cache.source(1, 0, 72).keys)
    (report,) = rolled.metadata.reports
    assert (report.tokens, report.budget, report.blocks) == (72, 8, 3)
    assert (report.entries_before, report.entries_after) == (72 * 4, 8 * 4)
    with pytest.raises(BudgetError, match="block by block"):
        compact(engine, tiny_text(40), strategy, budget=8, rolling=True)


def test_as_the_strategy_of_a_chat(tmp_path):
    engine = TransformersEngine(chat_model())
    path = tiny_writer_file(engine, tmp_path, context=64, latents=16)
    policy = SessionPolicy(
        strategy="fast_diamond", settings={"writer": path}, ratio=4, window=400, trigger="60%", keep="messages:2"
    )
    with Session(engine, policy=policy, sampling=SamplingSettings(max_new_tokens=8)) as session:
        for turn in range(8):
            session.send(f"message {turn} " + "word " * 12)
        compactions = session.status().compactions
    assert compactions


def test_a_model_without_a_writer(engines):
    with pytest.raises(WriterFileError, match="no writer comes with the package for tiny-llama: train one with"):
        compact(engines["llama"], tiny_text(40), "fast_diamond")


def test_writers_that_do_not_fit(engines, writers, tmp_path):
    with pytest.raises(WriterFileError, match="trained for tiny-llama"):
        compact(engines["qwen3"], tiny_text(40), "fast_diamond", writer=writers["llama"])
    other = TransformersEngine(tiny_model("llama", num_key_value_heads=4))
    with pytest.raises(WriterFileError, match="2 KV heads of dimension 16, and the model has 2 of 4"):
        compact(other, tiny_text(40), "fast_diamond", writer=writers["llama"])
    with pytest.raises(WriterFileError, match="there is no writer at"):
        compact(engines["llama"], tiny_text(40), "fast_diamond", writer=str(tmp_path / "nothing"))


def _flip(data):
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda _: b"no writer at all", "damaged"),
        (lambda _: b"", "damaged"),
        (_flip, "does not match its digest"),
    ],
)
def test_damaged_files(writers, tmp_path, damage, said):
    path = tmp_path / "writer.safetensors"
    path.write_bytes(damage(Path(writers["llama"]).read_bytes()))
    with pytest.raises(WriterFileError, match=said) as caught:
        load_writer(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_writers(engines, tmp_path):
    path = tmp_path / "writer.safetensors"
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(WriterFileError, match="was not written by agentcompact train-writer"):
        load_writer(path)
    writer, record = tiny_writer(engines["llama"])
    save_writer(writer, record.model_copy(update={"version": 99}), path, overwrite=True)
    with pytest.raises(WriterFileError, match="version 99"):
        load_writer(path)
    save_writer(writer, record.model_copy(update={"layers": 5}), path, overwrite=True)
    with pytest.raises(WriterFileError, match="sizes of its settings"):
        load_writer(path)
    with torch.no_grad():
        writer.key[0, 0, 0, 0] = float("nan")
    save_writer(writer, record, path, overwrite=True)
    with pytest.raises(WriterFileError, match="not finite"):
        load_writer(path)


def test_a_writer_is_read_as_it_was_written(engines, tmp_path):
    writer, record = tiny_writer(engines["llama"])
    path = save_writer(writer, record, tmp_path / "writer.safetensors")
    read, known = load_writer(tmp_path)
    assert known == record
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(path).values())
    for name, parameter in writer.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter.detach().to(torch.bfloat16).float())
        assert not read.get_parameter(name).requires_grad
    assert WriterRecord.model_validate_json(known.model_dump_json()) == record


def test_the_command(engines, tmp_path, run):
    loaded = engines["llama"].model
    saved(loaded, tmp_path / "model")
    (tmp_path / "book.txt").write_text(tiny_text(60))
    path = tiny_writer_file(engines["llama"], tmp_path)
    arguments = ("compact", "book.txt", "--model", "model", "--strategy", "fast_diamond", "--ratio", 3)
    code, out, err = run(*arguments, "--writer", path, "-o", "book.kv", "--json", "-q")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["strategy"], facts["settings"]["writer"], facts["budget"]) == ("fast_diamond", path, 20)
    assert (tmp_path / "book.kv").exists()

    other = TransformersEngine(tiny_model("llama", seed=9))
    (tmp_path / "other").mkdir()
    (tmp_path / "corrupt").write_bytes(b"nothing")
    for wrong in (tiny_writer_file(other, tmp_path / "other"), tmp_path / "corrupt", tmp_path / "missing"):
        code, out, err = run(*arguments, "--writer", wrong, "-o", "other.kv", "-q")
        assert (code, out) == (2, "")
        assert len(err.strip().splitlines()) == 1
    code, _, err = run(*arguments, "-o", "other.kv", "-q")
    assert code == 2
    assert "agentcompact train-writer" in err
    code, _, err = run("compact", "book.txt", "--model", "model", "--writer", path, "-o", "other.kv", "-q")
    assert code == 2
    assert "no setting 'writer'" in err
    assert not (tmp_path / "other.kv").exists()


def test_budgets_that_cannot_be_met(engines, writers):
    with pytest.raises(BudgetError):
        recompact(
            engines["llama"],
            engines["llama"].prefill(tiny_tokens(9)),
            "fast_diamond",
            budget=0,
            writer=writers["llama"],
        )
