"""Hashes that tell models and tokenizers apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_models_helpers import tiny_llama, tiny_tokenizer
from tokenizers import pre_tokenizers

from agentcompact.models import model_fingerprint, tokenizer_hash


def test_same_weights_agree() -> None:
    assert model_fingerprint(tiny_llama(3)) == model_fingerprint(tiny_llama(3))
    assert model_fingerprint(tiny_llama(3)) != model_fingerprint(tiny_llama(4))
    assert len(model_fingerprint(tiny_llama())) == 32


def test_bfloat16_and_float32_loads_agree() -> None:
    in_bfloat16 = tiny_llama().to(torch.bfloat16)
    in_float32 = copy.deepcopy(in_bfloat16).float()
    from_float32 = tiny_llama()
    assert model_fingerprint(in_bfloat16) == model_fingerprint(in_float32) == model_fingerprint(from_float32)


@pytest.mark.parametrize("index", range(21))
def test_change_in_any_tensor_is_noticed(index: int) -> None:
    causal_lm = tiny_llama()
    before = model_fingerprint(causal_lm)
    parameters = list(causal_lm.parameters())
    assert len(parameters) == 21
    with torch.no_grad():
        parameters[index].mul_(1.02)
    assert model_fingerprint(causal_lm) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"num_attention_heads": 8, "num_key_value_heads": 4},
    ],
)
def test_geometry_counts(changes: dict[str, Any]) -> None:
    assert model_fingerprint(tiny_llama()) != model_fingerprint(tiny_llama(**changes))


def test_stated_context_length_does_not_count() -> None:
    assert model_fingerprint(tiny_llama()) == model_fingerprint(tiny_llama(max_position_embeddings=9999))


def test_sample_of_a_wide_matrix_is_spread_over_its_columns() -> None:
    causal_lm = tiny_llama(vocab_size=4096, hidden_size=64)
    before = model_fingerprint(causal_lm)
    with torch.no_grad():
        causal_lm.get_input_embeddings().weight[:, 1:].mul_(1.5)
    assert model_fingerprint(causal_lm) != before


def test_tokenizer_hash() -> None:
    first = tokenizer_hash(tiny_tokenizer())
    assert first == tokenizer_hash(tiny_tokenizer(chat_template=None))
    assert len(first) == 32
    longer = tiny_tokenizer()
    longer.add_tokens(["lighthouse"])
    assert tokenizer_hash(longer) != first


def test_tokenizer_hash_sees_how_texts_are_cut() -> None:
    other = tiny_tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert other.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer_hash(other) != tokenizer_hash(tiny_tokenizer())
