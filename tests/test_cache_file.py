"""The cache file: round trip, checks, and writing that is whole or not at all."""

from __future__ import annotations

import json
import random
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import CompactedCache, CompactionRequest, TransformersEngine, compact, make_strategy
from agentcompact.errors import (
    CacheError,
    CacheFileError,
    DocumentError,
    OutputExistsError,
    WriteError,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def cache(model):
    return compact(model, tiny_text(120), "two_pass", ratio=8, document="words.txt")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("tail", [0, 3])
def test_round_trip(tmp_path, kind, tail):
    model = tiny_model(kind)
    engine = TransformersEngine(model)
    cache = compact(engine, tiny_text(60), "two_pass", ratio=4)
    if tail:
        engine.next_token_logits(cache, tiny_tokens(tail, seed=9))
    cache.save(tmp_path / "a.kv")
    read = CompactedCache.load(tmp_path / "a.kv", model)
    assert read.metadata == cache.metadata
    assert read.token_ids == cache.token_ids
    assert read.next_position == cache.next_position == 60 + tail
    for (_, a), (_, b) in zip(cache.full_layers, read.full_layers, strict=True):
        for part in ("keys", "values", "bias", "positions"):
            assert torch.equal(getattr(a.span, part), getattr(b.span, part))
        assert a.span.offsets == b.span.offsets
    assert torch.equal(engine.next_token_logits(read, [5, 6]), engine.next_token_logits(cache, [5, 6]))


def test_ragged_round_trip_and_size_on_disk(tmp_path, smollm2, document):
    """At a real size, uniform and ragged, the file stays within 1.1x of its entries."""
    from test_cache import ragged

    engine = TransformersEngine(smollm2)
    live = engine.prefill(engine.encode(document)[:256])
    uniform = make_strategy("streaming_llm").compact(CompactionRequest(engine, live, 32)).cache
    for name, cache in (("uniform", uniform), ("ragged", ragged(engine, live, (1, 90, 5)))):
        path = cache.save(tmp_path / f"{name}.kv")
        nominal = cache.entries * (2 * 64 + 1) * 4
        assert path.stat().st_size <= 1.1 * nominal
        assert cache.nbytes <= 1.1 * nominal
        read = CompactedCache.load(path, smollm2)
        assert [layer.span.offsets for _, layer in read.full_layers] == [
            layer.span.offsets for _, layer in cache.full_layers
        ]
        again = engine.next_token_logits(cache.fork(), [5])
        assert torch.allclose(engine.next_token_logits(read, [5]), again, atol=1e-3)  # kernels depend on alignment


def test_a_cache_from_a_file_can_be_compacted_again(tmp_path, model, cache):
    """Its queries are recomputed from the token ids, and that pass is reported as compaction work."""
    from agentcompact import recompact

    cache.save(tmp_path / "a.kv")
    read = CompactedCache.load(tmp_path / "a.kv", model)
    again = recompact(model, read, "two_pass", ratio=24)
    assert again.entries == cache.entries // 3
    assert again.metadata.reports[-1].compaction_tokens == 120
    assert cache.captured is None  # a compacted cache keeps no queries alive
    direct = recompact(model, cache, "two_pass", ratio=24)
    assert torch.allclose(direct.layers[0].span.bias, again.layers[0].span.bias, atol=1e-4)


def test_loads_in_the_models_dtype(tmp_path, cache):
    cache.save(tmp_path / "a.kv")
    low = tiny_model("llama")
    low.causal_lm.to(torch.bfloat16)
    low.fingerprint = cache.metadata.model_fingerprint
    assert CompactedCache.load(tmp_path / "a.kv", low).layers[0].span.keys.dtype == torch.bfloat16


def test_readable_by_its_owner_only(tmp_path, cache):
    path = cache.save(tmp_path / "a.kv")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["a.kv"]


def test_an_existing_file_is_kept(tmp_path, cache):
    path = tmp_path / "a.kv"
    path.write_text("precious")
    with pytest.raises(OutputExistsError, match="--force"):
        cache.save(path)
    assert path.read_text() == "precious"
    cache.save(path, overwrite=True)
    assert path.stat().st_size > 1000


def test_every_flipped_byte_is_noticed(tmp_path, model, cache):
    path = cache.save(tmp_path / "a.kv")
    data = path.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    generator = random.Random(0)
    places = [
        *range(12),
        *generator.sample(range(12, header_end), 150),
        *generator.sample(range(header_end, len(data)), 60),
    ]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CacheFileError):
            CompactedCache.load(path, model)


def test_every_truncation_is_noticed(tmp_path, model, cache):
    path = cache.save(tmp_path / "a.kv")
    data = path.read_bytes()
    for length in (0, 5, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CacheFileError) as raised:
            CompactedCache.load(path, model)
        assert "\n" not in str(raised.value)
    path.write_bytes(data + b"x")
    with pytest.raises(CacheFileError):
        CompactedCache.load(path, model)


def test_files_that_are_no_cache(tmp_path, model):
    save_file({"x": torch.ones(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "text.kv").write_text("just some text, long enough to have a header")
    for name in ("weights.safetensors", "text.kv"):
        with pytest.raises(CacheFileError, match="not a cache file"):
            CompactedCache.load(tmp_path / name, model)
    with pytest.raises(DocumentError, match="no such file"):
        CompactedCache.load(tmp_path / "missing.kv", model)
    with pytest.raises(DocumentError, match="not a file"):
        CompactedCache.load(tmp_path, model)


def test_a_newer_version_is_refused(tmp_path, model, cache, monkeypatch):
    from agentcompact.cache import file

    monkeypatch.setattr(file, "FORMAT_VERSION", 2)
    path = cache.save(tmp_path / "a.kv")
    monkeypatch.undo()
    with pytest.raises(CacheFileError, match="version 2.*reads up to 1.*upgrade"):
        CompactedCache.load(path, model)


def test_another_model_or_tokenizer_is_refused(tmp_path, model, cache):
    path = cache.save(tmp_path / "a.kv")
    with pytest.raises(CacheFileError, match="another model"):
        CompactedCache.load(path, tiny_model("llama", seed=1))
    with pytest.raises(CacheFileError, match="another model"):
        CompactedCache.load(path, tiny_model("qwen3"))
    other = tiny_model("llama")
    other.tokenizer_hash = "another"
    with pytest.raises(CacheFileError, match="another tokenizer"):
        CompactedCache.load(path, other)


def test_the_metadata_says_how_the_cache_was_made(tmp_path, model, cache):
    path = cache.save(tmp_path / "a.kv")
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["agentcompact"])
    facts = header["metadata"]
    assert header["version"] == 1
    assert facts["model_fingerprint"] == model.fingerprint
    assert facts["tokenizer_hash"] == model.tokenizer_hash
    assert facts["document"] == "words.txt"
    assert len(facts["document_sha256"]) == 64
    assert facts["rope"]["rope_type"] == "default"
    (report,) = facts["reports"]
    assert report["strategy"] == "two_pass"
    assert report["settings"]["shortlist"] == 5.0
    assert report["entries_before"] == 2 * 2 * 120
    assert report["entries_after"] == 2 * 2 * 15


def test_a_batch_cannot_be_saved(tmp_path, model, cache):
    engine = TransformersEngine(model)
    batch = cache.fork(2)
    engine.read_prompts(batch, [[5], [6]])
    with pytest.raises(CacheError, match="several sequences"):
        batch.save(tmp_path / "a.kv")
    assert not list(tmp_path.iterdir())


def test_an_interruption_while_writing_leaves_nothing(tmp_path, cache, monkeypatch):
    from agentcompact.cache import file

    def interrupted(_tensors, path, _metadata):
        Path(path).write_bytes(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(file, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save(tmp_path / "a.kv")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_after_a_while(tmp_path, cache):
    import os
    import time

    old, new, other = (tmp_path / name for name in (".a.kv.x1.part", ".a.kv.x2.part", ".b.kv.x3.part"))
    for left in (old, new, other):
        left.write_text("half")
    for left in (old, other):
        os.utime(left, (time.time() - 7200,) * 2)
    cache.save(tmp_path / "a.kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.kv.x2.part", ".b.kv.x3.part", "a.kv"]


def test_without_hard_links_a_file_that_appeared_is_kept(tmp_path, cache, monkeypatch):
    def refused(path, _target):
        path.write_text("precious")
        raise PermissionError

    monkeypatch.setattr(Path, "hardlink_to", refused)
    with pytest.raises(OutputExistsError, match="nothing was overwritten"):
        cache.save(tmp_path / "a.kv")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_folders_that_cannot_take_it(tmp_path, cache):
    with pytest.raises(WriteError, match="does not exist"):
        cache.save(tmp_path / "missing" / "a.kv")
    with pytest.raises(WriteError, match="is a folder"):
        cache.save(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, cache):
    """A limit on the size of files stands for the full disk: the write itself fails, in the middle."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        sys.path.insert(0, sys.argv[2])
        from tiny import tiny_model, tiny_text
        from agentcompact import compact
        from agentcompact.errors import WriteError
        cache = compact(tiny_model("llama"), tiny_text(120), "two_pass", ratio=2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            cache.save(sys.argv[1] + "/a.kv")
        except WriteError as error:
            print("refused:", error)
        """
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "refused:" in made.stdout
    assert "could not be written" in made.stdout
    assert not list(tmp_path.iterdir())


def crafted(path, change):
    """Rewrite a cache file with changed header and tensors and a digest that fits them."""
    from agentcompact.cache.digest import tensors_digest

    with safe_open(path, framework="pt") as opened:
        text = opened.metadata()["agentcompact"]
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    header = json.loads(text)
    change(header, tensors)
    text = json.dumps(header, ensure_ascii=True, sort_keys=True)
    path.unlink()
    save_file(tensors, path, {"agentcompact": text, "digest": tensors_digest(text, tensors)})


def of(name, change):
    """A change of one tensor."""
    return lambda _header, tensors: tensors.update({name: change(tensors[name])})


CRAFTED = {
    "ids beyond the vocabulary": of("token_ids", lambda t: t + 10_000),
    "an empty stop string": lambda header, _: header["metadata"]["prompt"].update(stop=[""]),
    "nan": of("layers.0.values", lambda t: t.clone().fill_(float("nan"))),
    "infinite bias": of("layers.1.bias", lambda t: t.clone().fill_(float("inf"))),
    "negative offset": of("layers.0.offsets", lambda t: t - 1),
    "huge offset": of("layers.0.offsets", lambda t: t * 1000),
    "empty head": of("layers.0.offsets", lambda t: torch.tensor([0, 0, int(t[-1])])),
    "float offsets": of("layers.0.offsets", lambda t: t.float()),
    "another number of heads": of("layers.0.offsets", lambda t: torch.tensor([0, 1, 2, int(t[-1])])),
    "short bias": of("layers.0.bias", lambda t: t[:-1].clone()),
    "integer keys": of("layers.0.keys", lambda t: t.int()),
    "other head size": of("layers.0.keys", lambda t: t[:, :8].clone()),
    "position outside": of("layers.0.positions", lambda t: t + 1000),
    "negative ids": of("token_ids", lambda t: t - 1000),
    "missing ids of some tokens": of("token_ids", lambda t: t[:5].clone()),
    "missing part": lambda _, tensors: tensors.pop("layers.0.bias"),
    "missing layer": lambda _, tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("layers.1")],
    "unknown tensor": lambda _, tensors: tensors.update({"layers.9.keys": torch.ones(1)}),
    "fewer layers": lambda header, _: header["layers"].pop(),
    "negative before": lambda header, _: header["layers"][0].update(before=-5),
    "another length": lambda header, _: header["layers"][0].update(length=7),
    "text for a number": lambda header, _: header["layers"][0].update(length="7"),
    "layers that are none": lambda header, _: header.update(layers="many"),
    "no metadata": lambda header, _: header.pop("metadata"),
    "sliding where the model is not": lambda header, _: header["layers"][0].update(sliding=True),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(tmp_path, model, cache, name):
    """A digest that fits says nothing of the content: whatever does not hold together is refused in one line."""
    path = cache.save(tmp_path / "a.kv")
    crafted(path, CRAFTED[name])
    with pytest.raises(CacheFileError) as raised:
        CompactedCache.load(path, model)
    assert "\n" not in str(raised.value)
    crafted_unchanged = cache.save(tmp_path / "b.kv")
    crafted(crafted_unchanged, lambda *_: None)
    assert CompactedCache.load(crafted_unchanged, model).entries == cache.entries
