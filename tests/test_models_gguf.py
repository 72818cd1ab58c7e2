"""Converting GGUF files into transformers folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models_helpers import TEXT, tiny_tokenizer, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentcompact.errors import ModelNotFoundError, UnsupportedModelError, WriteError
from agentcompact.models import cache_root, convert_gguf, load_model
from agentcompact.models import gguf as gguf_module
from agentcompact.models.embedded import file_sha256


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTCOMPACT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf")


def left_behind(cache: Path) -> list[str]:
    """What the models folder of the cache holds."""
    models = cache / "models"
    return sorted(entry.name for entry in models.iterdir()) if models.exists() else []


def test_conversion_keeps_weights_and_tokenizer(tiny: Path, cache: Path) -> None:
    lines: list[str] = []
    folder = convert_gguf(tiny, progress=lines.append)
    assert folder == cache / "models" / f"tiny.F32-{file_sha256(tiny)[:16]}"
    assert left_behind(cache) == [folder.name]
    assert lines
    assert all(line.startswith("converting tiny.F32.gguf") for line in lines)
    causal_lm = AutoModelForCausalLM.from_pretrained(folder)
    assert causal_lm.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(causal_lm.get_input_embeddings().weight.shape, generator=generator).mul(0.2)
    assert torch.equal(causal_lm.get_input_embeddings().weight, first)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXT:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template


def test_second_conversion_is_only_looked_up(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert_gguf(tiny)
    monkeypatch.setattr(gguf_module, "_convert", None)
    lines: list[str] = []
    assert convert_gguf(tiny, progress=lines.append) == folder
    assert lines == []


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_incomplete_conversion_is_made_again(tiny: Path, lost: str) -> None:
    folder = convert_gguf(tiny)
    (folder / lost).unlink()
    assert convert_gguf(tiny) == folder
    assert (folder / lost).is_file()


def test_files_beside_the_gguf_are_not_read(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    loaded = load_model(str(path), device="cpu")
    assert loaded.source.kind == "gguf"
    assert loaded.geometry.model_type == "llama"
    assert loaded.tokenizer(TEXT[0], add_special_tokens=False)["input_ids"] == tiny_tokenizer()(TEXT[0])["input_ids"]


def test_nothing_is_printed(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert_gguf(tiny)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("keep", [4, 200, 3000, -1000])
def test_truncated_file(tiny: Path, tmp_path: Path, cache: Path, keep: int) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(ModelNotFoundError, match="is damaged") as caught:
        convert_gguf(damaged)
    assert "\n" not in str(caught.value)
    assert left_behind(cache) == []


def test_garbage_after_the_magic(tmp_path: Path, cache: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + os.urandom(4000))
    with pytest.raises(ModelNotFoundError, match="is damaged"):
        convert_gguf(damaged)
    assert left_behind(cache) == []


def test_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "part.gguf", leave_out="blk.1.attn_k.weight")
    with pytest.raises(ModelNotFoundError, match=r"layers\.1\.self_attn\.k_proj"):
        convert_gguf(path)


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", architecture="llemur")
    with pytest.raises(ModelNotFoundError, match="architecture llemur"):
        convert_gguf(path)


def test_unsupported_model_is_refused_before_conversion(tiny: Path, cache: Path, monkeypatch: Any) -> None:
    def refuse(config: Any) -> None:
        raise UnsupportedModelError(f"no {config.model_type}")

    monkeypatch.setattr(gguf_module, "check_supported", refuse)
    lines: list[str] = []
    with pytest.raises(UnsupportedModelError, match="no llama"):
        convert_gguf(tiny, progress=lines.append)
    assert len(lines) == 1
    assert left_behind(cache) == []


def test_interrupt_leaves_nothing(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "_read_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tiny)
    assert left_behind(cache) == []


def test_cache_that_cannot_be_written(tiny: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(WriteError, match="cannot write to the cache folder"):
        convert_gguf(tiny)


def test_two_at_once_end_with_one_folder(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = gguf_module._convert

    def convert_after_another_process(*arguments: Any) -> None:
        monkeypatch.setattr(gguf_module, "_convert", convert)
        convert_gguf(tiny)
        convert(*arguments)

    monkeypatch.setattr(gguf_module, "_convert", convert_after_another_process)
    folder = convert_gguf(tiny)
    assert left_behind(cache) == [folder.name]


def test_stale_staging_folders_are_removed(tiny: Path, cache: Path) -> None:
    for name, age in ((".staging-old", 3 * 24 * 3600), (".staging-new", 60)):
        (cache / "models" / name).mkdir(parents=True)
        then = os.stat(cache).st_mtime - age  # noqa: PTH116
        os.utime(cache / "models" / name, (then, then))
    folder = convert_gguf(tiny)
    assert left_behind(cache) == [".staging-new", folder.name]


def test_cache_root_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTCOMPACT_CACHE_DIR")
    assert cache_root().name == "agentcompact"
