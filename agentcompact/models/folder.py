"""Read a transformers folder piece by piece, with one line for each thing that can be wrong with it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agentcompact.errors import InputError, ModelNotFoundError, UnsupportedModelError
from agentcompact.models.quiet import one_line, quiet_transformers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# What transformers was seen to raise for a folder that is damaged or incomplete.
READ_ERRORS: tuple[type[BaseException], ...] = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    pickle.UnpicklingError,
    SafetensorError,
    hub_errors.StrictDataclassError,
)


def read_config(folder: Path, name: str, *, trust_remote_code: bool) -> Any:
    """The configuration in a folder.

    Args:
        folder: a folder with a `config.json`.
        name: what to call the model in messages.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ModelNotFoundError: if `config.json` is missing or damaged.
        UnsupportedModelError: if transformers does not know the model type.
        InputError: if it needs code of its own and that is not trusted.
    """
    stated = _read_json(folder / "config.json", name)
    known = stated.get("model_type") in CONFIG_MAPPING
    if "model_type" in stated and not known and "auto_map" not in stated:
        raise UnsupportedModelError(
            f"models of type '{stated['model_type']}' cannot be loaded: "
            f"transformers {transformers.__version__} does not know them"
        )
    with quiet_transformers():
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except READ_ERRORS as error:
            raise _failure(name, "config.json", error) from error


def read_tokenizer(folder: Path, name: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer in a folder; arguments and errors as for `read_config`."""
    if not _has_tokenizer(folder):
        raise ModelNotFoundError(f"the model '{name}' has no tokenizer files (such as tokenizer.json)")
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except READ_ERRORS as error:
            raise _failure(name, "tokenizer", error) from error


def read_skeleton(config: Any, name: str) -> Any:
    """A model of this configuration without weights (on the meta device), to look at its modules.

    Raises:
        UnsupportedModelError: if transformers has no causal language model for this configuration.
    """
    with quiet_transformers(), torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except READ_ERRORS as error:
            raise UnsupportedModelError(
                f"the model '{name}' cannot be built as a causal language model: {one_line(error)}"
            ) from error


def read_weights(folder: Path, name: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """The causal language model in a folder, with its attention on "sdpa".

    Args:
        dtype: what the weights are converted to.
        device: where they are put.
        folder, name, trust_remote_code: as for `read_config`.

    Raises:
        ModelNotFoundError: if weights are missing, damaged, incomplete, or do not fit on the device.
        InputError: if the model needs code of its own and that is not trusted.
    """
    missing = missing_weights(folder)
    if missing is not None:
        raise ModelNotFoundError(f"the model '{name}' has no weights: {missing} is missing")
    with quiet_transformers():
        try:
            causal_lm, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            refuse_missing_tensors(report, name)
            return causal_lm.to(device)
        except READ_ERRORS as error:
            raise _failure(name, "weights", error) from error


def refuse_missing_tensors(report: dict[str, Any], name: str) -> None:
    """Refuse weights that lack a tensor; transformers would fill it with random numbers and only log it.

    Raises:
        ModelNotFoundError: naming one missing tensor.
    """
    absent = sorted(str(key) for key in report.get("missing_keys", ()))
    if absent:
        raise ModelNotFoundError(f"the weights of the model '{name}' are incomplete: '{absent[0]}' is missing")


def missing_weights(folder: Path) -> str | None:
    """The name of the first weight file that a folder lacks, or None if it has all of them."""
    for single in _WEIGHT_FILES:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return None
        if index.is_file():
            return next((shard for shard in shard_names(index) if not (folder / shard).is_file()), None)
    return _WEIGHT_FILES[0]


def shard_names(index: Path) -> list[str]:
    """The weight files that an index file lists, sorted; a damaged index gives none."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        return sorted({str(shard) for shard in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def is_loadable(folder: Path) -> bool:
    """Whether a folder has a configuration, a tokenizer and all its weights."""
    return (folder / "config.json").is_file() and _has_tokenizer(folder) and missing_weights(folder) is None


def _has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds any file that a tokenizer can be read from."""
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        return True
    return any(folder.glob("*.tiktoken")) or any(folder.glob("tokenization_*.py"))


def _read_json(path: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"the model '{name}' has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"the {path.name} of the model '{name}' is damaged: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"the {path.name} of the model '{name}' is damaged: it holds no JSON object")
    return content


def _failure(name: str, part: str, error: BaseException) -> InputError:
    """The one-line error for a part of a model that transformers could not read."""
    if "trust_remote_code" in str(error):
        return InputError(
            f"the model '{name}' runs code of its own, which is off; pass --trust-remote-code "
            "(trust_remote_code=True) if you trust where it comes from"
        )
    return ModelNotFoundError(f"the {part} of the model '{name}' cannot be read: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Why transformers could not read something, in one line that makes sense without its log."""
    if "ignore_mismatched_sizes" in str(error):
        return "tensors have other shapes than the configuration says"
    if isinstance(error, hub_errors.StrictDataclassError):  # its first line only names the check that failed
        return one_line(str(error).strip().rpartition("\n")[2])
    return one_line(error)
