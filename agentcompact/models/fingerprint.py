"""Short hashes that tell whether a saved cache fits a model and a tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from agentcompact.models.geometry import read_geometry

_SAMPLES = 512
_FINGERPRINT_LENGTH = 32
_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  def f(x):\n\treturn x ** 2  # 3.14159, 0xFF\n",
    "Größe, naïve, 東京, Привет, 🙂",
    "1234567890 x-1_000 https://example.org/a?b=c",
)


def model_fingerprint(causal_lm: Any) -> str:
    """A hash of a model's attention geometry and of a sample of every weight tensor.

    Up to 512 values of each parameter, at a fixed stride, are rounded to bfloat16 before they are hashed. So
    the same weights loaded as float32 and as bfloat16 agree, and so do two devices. A float16 load may
    differ: its values are rounded twice. A change that leaves all the sampled values alone goes unnoticed.

    Args:
        causal_lm: a transformers causal language model with its weights loaded.

    Returns:
        The first 32 hexadecimal digits of a SHA-256.

    Raises:
        UnsupportedModelError: if the geometry cannot be read.
    """
    geometry = dataclasses.asdict(read_geometry(causal_lm))
    del geometry["max_positions"]
    digest = hashlib.sha256(json.dumps(geometry, sort_keys=True).encode())
    shapes, samples = [], []
    for name, parameter in _named_parameters(causal_lm):
        shapes.append((name, list(parameter.shape)))
        samples.append(_sample(parameter))
    digest.update(json.dumps(shapes).encode())
    if samples:
        bits = torch.cat([sample.to(samples[0].device) for sample in samples]).view(torch.int16)
        digest.update(bits.cpu().numpy().astype("<i2").tobytes())
    return digest.hexdigest()[:_FINGERPRINT_LENGTH]


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary and of how it cuts a few texts.

    Args:
        tokenizer: a transformers tokenizer.

    Returns:
        The first 32 hexadecimal digits of a SHA-256. Equal hashes mean that token ids mean the same text.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    probes = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _PROBES]
    content = json.dumps([vocabulary, probes], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:_FINGERPRINT_LENGTH]


def _named_parameters(causal_lm: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every distinct parameter with its name, sorted by name; tied ones come once."""
    yield from sorted(causal_lm.named_parameters(), key=lambda item: str(item[0]))


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """At most 512 values at a fixed stride through the flattened tensor, as bfloat16: `(samples,)`.

    The stride is odd, so that it does not stay in one column of a matrix whose rows have an even length.
    """
    flat = parameter.detach().reshape(-1)
    stride = -(-flat.numel() // _SAMPLES) | 1
    return flat[::stride].to(torch.bfloat16)
