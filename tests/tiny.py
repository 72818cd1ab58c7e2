"""Tiny randomly initialised models and a word tokenizer, shared by the tests; holds no tests itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentcompact import LoadedModel, wrap_model

VOCABULARY = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide enough that attention is not flat
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
}
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"use_sliding_window": False}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA3),
}


def tiny_tokenizer() -> Any:
    """Return a word-level tokenizer of `VOCABULARY` words: <s>, </s>, <unk>, and w3 to w127."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def tiny_model(kind: str, seed: int = 0, **overrides: Any) -> LoadedModel:
    """Return a wrapped float32 model of a kind in `_KINDS`; overrides replace fields of its configuration."""
    config_name, model_name, changes = _KINDS[kind]
    config = getattr(transformers, config_name)(**{**_SIZES, **changes, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config).to(torch.float32)
    return wrap_model(model, tiny_tokenizer(), name=f"tiny-{kind}")


def saved(model: LoadedModel, path: Path) -> str:
    """Write a model and its tokenizer into a folder; return it as the command takes it."""
    model.causal_lm.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return str(path)


def tiny_tokens(count: int, seed: int = 0) -> list[int]:
    """Return random ids of ordinary words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def tiny_text(count: int, seed: int = 0) -> str:
    """Return a text that the tiny tokenizer reads as `tiny_tokens(count, seed)`."""
    return " ".join(f"w{i}" for i in tiny_tokens(count, seed))


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template that knows roles and nothing of tools."""
DROPS_REASONING = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set text = text.split('|')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template that leaves out what stands before a | in all assistant's messages but the last."""
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template that refuses system messages and roles that do not alternate."""
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that knows tools, calls and results."""


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """Return a tokenizer of single bytes, with ChatML's control tokens and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    made.chat_template = template
    return made


def chat_model(kind: str = "llama", template: str | None = CHATML, seed: int = 0, **overrides: Any) -> LoadedModel:
    """Return a tiny random model that reads bytes and has a chat template."""
    config_name, model_name, changes = _KINDS[kind]
    tokenizer = byte_tokenizer(template)
    sizes = {**_SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = getattr(transformers, config_name)(**{**sizes, **ids, **changes, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config).to(torch.float32)
    return wrap_model(model, tokenizer, name=f"chat-{kind}")
