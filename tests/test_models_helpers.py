"""Tiny models, tokenizers and servers for the tests of agentcompact.models; holds no tests itself."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "The ferry leaves the harbour at seven and returns after dusk.",
    "Write a function that adds two numbers, then test it with 12 and 30.",
    "Nobody had seen the lighthouse keeper since the storm of last October.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level BPE tokenizer of at most 320 tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A randomly initialised Llama of two layers."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changes})).eval()


def save_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Save a tiny Llama and its tokenizer as a transformers folder."""
    tiny_llama(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


Answer = Callable[[str], tuple[int, dict[str, str], bytes]]


@contextlib.contextmanager
def loopback_server(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """An HTTP server on a free loopback port; yields its address and the list of paths asked for so far."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            status, headers, body = answer(self.path)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_arguments: Any) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def closed_address() -> str:
    """The address of a loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def write_tiny_gguf(path: Path, seed: int = 0, *, architecture: str = "llama", leave_out: str = "") -> Path:
    """Write a tiny Llama with a byte-level BPE tokenizer as a float32 GGUF file.

    Args:
        path: the file to write.
        seed: of the random weights.
        architecture: what the file says it holds.
        leave_out: the GGUF name of one tensor that is not written.
    """
    rows = torch.Generator().manual_seed(seed)
    core = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(core["model"]["vocab"], key=core["model"]["vocab"].get)
    heads, kv_heads, hidden, inner = 4, 2, 32, 48
    shapes = {"token_embd.weight": (len(tokens), hidden), "output_norm.weight": (hidden,)}
    for layer in range(2):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_q.weight": (hidden, hidden),
            block + "attn_k.weight": (hidden * kv_heads // heads, hidden),
            block + "attn_v.weight": (hidden * kv_heads // heads, hidden),
            block + "attn_output.weight": (hidden, hidden),
            block + "attn_norm.weight": (hidden,),
            block + "ffn_gate.weight": (inner, hidden),
            block + "ffn_up.weight": (inner, hidden),
            block + "ffn_down.weight": (hidden, inner),
            block + "ffn_norm.weight": (hidden,),
        }
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in core["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, shape in shapes.items():
        if name != leave_out:
            writer.add_tensor(name, torch.randn(shape, generator=rows).mul(0.2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
