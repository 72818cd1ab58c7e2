"""Loading models from folders, and wrapping models that are loaded already."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_models_helpers import SMALL, save_tiny_llama, tiny_llama, tiny_tokenizer

from agentcompact.errors import InputError, ModelNotFoundError, UnsupportedModelError
from agentcompact.models import load_model, model_fingerprint, wrap_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def failure(folder: Path, kind: type[InputError] = ModelNotFoundError, **options: Any) -> str:
    """The one-line message that loading the folder ends in."""
    with pytest.raises(kind) as caught:
        load_model(str(folder), device="cpu", **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder(original: Path) -> None:
    lines: list[str] = []
    loaded = load_model(str(original), device="cpu", progress=lines.append)
    assert lines == [f"loading {original}"]
    assert loaded.source.kind == "folder"
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert loaded.geometry.layers == 2
    assert not loaded.causal_lm.training
    assert not any(parameter.requires_grad for parameter in loaded.causal_lm.parameters())
    assert loaded.causal_lm.config._attn_implementation == "sdpa"
    expected = tiny_llama()
    assert loaded.fingerprint == model_fingerprint(expected)
    ids = loaded.tokenizer("The ferry leaves", return_tensors="pt")["input_ids"]
    assert torch.allclose(loaded.causal_lm(ids).logits, expected(ids).logits, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(original: Path, dtype: str) -> None:
    loaded = load_model(str(original), dtype=dtype, device="cpu")
    assert loaded.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.causal_lm.parameters()} == {getattr(torch, dtype)}


def test_unknown_dtype(original: Path) -> None:
    assert "auto, float32, bfloat16, float16" in failure(original, InputError, dtype="int8")


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "", "meta"])
def test_unavailable_device(original: Path, device: str) -> None:
    with pytest.raises(InputError, match="try 'cpu' or 'auto'"):
        load_model(str(original), device=device)


def test_nothing_is_printed_and_settings_are_restored(original: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(original), device="cpu")
    failure(original, InputError, dtype="int8")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, bars)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("content", ["{broken", "", "[1, 2]", "\xff\xfe"])
def test_broken_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert "config.json of the model" in failure(folder)


def test_config_without_a_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert "config.json" in failure(folder)


def test_config_with_impossible_heads(folder: Path) -> None:
    change_config(folder, num_attention_heads=5)
    assert "not a multiple of the number of attention heads" in failure(folder)


def test_unknown_type(folder: Path) -> None:
    change_config(folder, model_type="llemur")
    assert "'llemur' cannot be loaded" in failure(folder, UnsupportedModelError)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights: model.safetensors is missing" in failure(folder)


def test_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "model-00002-of-00002.safetensors is missing" in failure(folder)


@pytest.mark.parametrize("keep", [0, 100, -500])
def test_truncated_weights(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "weights of the model" in failure(folder)


def test_missing_tensor_is_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "are incomplete: 'model.layers.1.mlp.up_proj.weight' is missing" in failure(folder)


def test_tensor_of_another_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=64)
    assert "other shapes than the configuration says" in failure(folder)


def test_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer files" in failure(folder)


def test_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "the tokenizer of the model" in failure(folder)


def test_remote_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (folder / "configuration_own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    change_config(folder, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    assert "--trust-remote-code" in failure(folder, InputError)
    assert not trace.exists()


def test_unsupported_is_said_before_weights_are_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    change_config(folder, attn_logit_softcapping=50.0)
    assert "soft-capping" in failure(folder, UnsupportedModelError)
    transformers.StableLmConfig(**SMALL).save_pretrained(folder)
    assert "attention interface" in failure(folder, UnsupportedModelError)


def test_no_causal_language_model(folder: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2}
    transformers.Qwen2_5_VLConfig(vision_config=vision).save_pretrained(folder)
    assert "causal language model" in failure(folder, UnsupportedModelError)


def test_wrap_model() -> None:
    causal_lm = tiny_llama().train()
    loaded = wrap_model(causal_lm, tiny_tokenizer(), name="mine")
    assert loaded.causal_lm is causal_lm
    assert not causal_lm.training
    assert not any(parameter.requires_grad for parameter in causal_lm.parameters())
    assert (loaded.source.kind, loaded.source.identity) == ("memory", "mine")
    assert wrap_model(causal_lm, tiny_tokenizer()).source.name == "LlamaForCausalLM"


def test_wrap_refuses_what_cannot_be_compacted() -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        wrap_model(transformers.GPT2LMHeadModel(config), tiny_tokenizer())


@pytest.mark.parametrize(
    ("placed", "named"),
    [
        ({"model.layers.0": 0, "model.layers.1": 1}, "cuda:0, cuda:1"),
        ({"model": "cpu", "lm_head": torch.device("cuda", 0)}, "cpu, cuda:0"),
        ({"model": "cpu", "lm_head": "disk"}, "'disk'"),
    ],
)
def test_wrap_refuses_a_model_on_several_devices(placed: dict[str, Any], named: str) -> None:
    causal_lm = tiny_llama()
    causal_lm.hf_device_map = placed
    with pytest.raises(UnsupportedModelError, match=named):
        wrap_model(causal_lm, tiny_tokenizer())


def test_wrap_takes_a_device_map_with_one_device() -> None:
    causal_lm = tiny_llama()
    causal_lm.hf_device_map = {"": "cpu"}
    assert wrap_model(causal_lm, tiny_tokenizer()).device == torch.device("cpu")


def test_wrap_refuses_weights_on_meta() -> None:
    causal_lm = tiny_llama()
    causal_lm.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="'meta'"):
        wrap_model(causal_lm, tiny_tokenizer())


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, agentcompact.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
