"""Teacher rollouts kept on disk, so that another ratio of the same document need not make them again.

One safetensors file for each model, number format, document, bank of prompts and limits, in the folder `rollouts` of
the user's cache, readable by its owner only: it tells what the document says. A second file holds the answers of a run
that was interrupted while it made them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.errors import WriteError
from agentcompact.files import atomic_output
from agentcompact.models.cache_dir import cache_root
from agentcompact.queries.rollouts import Answer, Rollout, Rollouts

VERSION = 1


def rollouts_dir() -> Path:
    """The folder of kept rollouts; it is not created here."""
    return cache_root() / "rollouts"


def rollout_key(cache: CompactedCache, prompts: Sequence[Sequence[int]], most_tokens: int, top: int, pool: int) -> str:
    """Return what rollouts depend on as 32 hexadecimal digits: the model, what the cache holds, prompts and limits.

    A cache that was compacted before counts by its entries, any other by its token ids.
    """
    facts = cache.metadata
    digest = hashlib.blake2b(digest_size=16)
    head = [VERSION, facts.model_fingerprint, facts.model_dtype, facts.tokenizer_hash, most_tokens, top, pool]
    digest.update(json.dumps([head, cache.next_position, cache.token_ids, [list(each) for each in prompts]]).encode())
    if cache.is_compacted or len(cache.token_ids) != cache.next_position:
        for _, layer in cache.full_layers:
            span = layer.all_entries()
            if span is not None:
                digest.update(json.dumps(span.offsets).encode())
                for part in (span.keys.float(), span.values.float(), span.bias.float()):
                    digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class RolloutStore:
    """Reads and writes the rollouts of one key in a folder; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self.key = key
        self._file = None if folder is None else folder / f"{key}.safetensors"
        self._part = None if folder is None else folder / f"{key}.answers.safetensors"

    def load(self) -> Rollouts | None:
        """Return the rollouts, or None where there are none that can be read."""
        found = _read(self._file)
        if found is None:
            return None
        lengths, prompts = found["lengths"].tolist(), found["prompts"].tolist()
        tokens = found["tokens"].tolist()
        items, at, step = [], 0, 0
        for prompt, steps in lengths:
            rows = slice(step, step + steps)
            items.append(
                Rollout(
                    prompts[at : at + prompt],
                    tokens[rows],
                    found["top_ids"][rows].long(),
                    found["top_logits"][rows],
                    found["log_normalizer"][rows],
                )
            )
            at, step = at + prompt, step + steps
        queries = {int(name[8:]): tensor for name, tensor in found.items() if name.startswith("queries.")}
        return Rollouts(items, queries)

    def save(self, rollouts: Rollouts) -> None:
        """Keep the rollouts, and forget the answers that were kept while they were made."""
        if self._file is None or self._part is None:
            return
        items = rollouts.items
        tensors = {
            "lengths": torch.tensor([[len(item.prompt), len(item.tokens)] for item in items]),
            "prompts": torch.tensor([token for item in items for token in item.prompt]),
            "tokens": torch.tensor([token for item in items for token in item.tokens]),
            "top_ids": torch.cat([item.top_ids for item in items]).to(torch.int32),
            "top_logits": torch.cat([item.top_logits for item in items]),
            "log_normalizer": torch.cat([item.log_normalizer for item in items]),
            **{f"queries.{index}": tensor for index, tensor in rollouts.queries.items()},
        }
        _write(self._file, tensors)
        self._part.unlink(missing_ok=True)

    def load_answers(self) -> dict[int, Answer]:
        """Return the answers that an interrupted run had made, by the prompt's number."""
        found = _read(self._part)
        return (
            {}
            if found is None
            else {
                int(number): Answer(**answer)
                for number, answer in json.loads(bytes(found["answers"].tolist()).decode()).items()
            }
        )

    def save_answers(self, answers: dict[int, Answer]) -> None:
        """Keep the answers made so far."""
        if self._part is not None:
            text = json.dumps({number: asdict(answer) for number, answer in answers.items()}).encode()
            _write(self._part, {"answers": torch.tensor(list(text), dtype=torch.uint8)})


def _read(path: Path | None) -> dict[str, Tensor] | None:
    """Return the tensors of a file, or None where it is not there or was damaged."""
    if path is None or not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"cannot write to the cache folder {path.parent}: {error.strerror or error}") from error
    with atomic_output(path, overwrite=True) as temporary:
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        except SafetensorError as error:
            raise WriteError(f"{path} could not be written: {error}") from error
