"""Measure prefill, compaction, decoding, batching and loading on the embedded model, as ratios within one process.

    python benchmarks/run.py                    # all of it, about five minutes on two cores
    python benchmarks/run.py compaction memory  # some of it
    python benchmarks/run.py --json

Every ratio compares two things measured in turn in this process, several times; the median is printed. Times alone
depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentcompact import (
    CompactedCache,
    CompactionRequest,
    LoadedModel,
    SamplingSettings,
    TransformersEngine,
    answer,
    load_model,
    make_strategy,
    wrap_model,
)
from agentcompact.strategies import compact_in_blocks

DOCUMENT = Path(__file__).parent.parent / "examples" / "harbour_audit.txt"


def tokens_of(engine: TransformersEngine, count: int) -> list[int]:
    """The demo document, again and again, up to a length."""
    ids = engine.encode(DOCUMENT.read_text(encoding="utf-8"))
    return (ids * (count // len(ids) + 1))[:count]


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios pair by pair."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


COMPACTED = ("streaming_llm", "two_pass", "high_attn", "kvzip", "kvzip_plus", "attention_matching", "omp")


def bench_compaction(model: LoadedModel) -> dict[str, float]:
    """Strategies at 16x of 4,096 tokens, against the prefill; repeat passes are in their time."""
    engine = TransformersEngine(model)
    ids = tokens_of(engine, 4096)
    prefills: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in COMPACTED}
    for _ in range(3):
        begun = time.perf_counter()
        cache = engine.prefill(ids, capture_seed=0)
        prefills.append(time.perf_counter() - begun)
        for name in COMPACTED:
            times[name].append(seconds(partial(make_strategy(name).compact, CompactionRequest(engine, cache, 256))))
    return {
        "prefill of 4,096 tokens, seconds": statistics.median(prefills),
        **{f"{name} at 16x / prefill": ratio(times[name], prefills) for name in COMPACTED},
    }


def bench_decoding(model: LoadedModel) -> dict[str, float]:
    """64 tokens decoded from the 16x cache of 8,000 tokens, against the full cache."""
    engine = TransformersEngine(model)
    model.causal_lm.generation_config.eos_token_id = None
    full = engine.prefill(tokens_of(engine, 8000), capture_seed=0)
    small = make_strategy("two_pass").compact(CompactionRequest(engine, full, 500)).cache
    whole = make_strategy("none").compact(CompactionRequest(engine, full, 8000)).cache
    sampling = SamplingSettings(max_new_tokens=64)
    prompt = [engine.encode("\nQuestion: what happened?\nAnswer:")]
    times: dict[str, list[float]] = {"small": [], "live": [], "span": [], "plain": []}
    for _ in range(3):
        times["small"].append(seconds(lambda: engine.decode(small.fork(1), prompt, sampling)))
        times["span"].append(seconds(lambda: engine.decode(whole.fork(1), prompt, sampling)))
        live = full.fork()
        times["live"].append(seconds(partial(engine.decode, live, prompt, sampling)))
        times["plain"].append(_decode_plain(model, full, prompt[0]))
    return {
        "64 tokens from the full cache (transformers' DynamicCache), seconds": statistics.median(times["plain"]),
        "64 tokens, 16x cache / full cache (DynamicCache)": ratio(times["small"], times["plain"]),
        "64 tokens, 16x cache / full cache (ours, live)": ratio(times["small"], times["live"]),
        "64 tokens, 16x cache / full cache (ours, as a span)": ratio(times["small"], times["span"]),
    }


@torch.no_grad()
def _decode_plain(model: LoadedModel, full: CompactedCache, prompt: list[int]) -> float:
    """The same tokens through transformers' own cache and attention; filling that cache is not timed."""
    from transformers import DynamicCache

    lm = model.causal_lm
    cache = DynamicCache(config=lm.config)
    for index, layer in full.full_layers:
        cache.update(
            layer.tail.keys[:, :, : layer.length].clone(),
            layer.tail.values[:, :, : layer.length].clone(),
            index,
        )
    lm.set_attn_implementation("sdpa")
    try:
        begun = time.perf_counter()
        step = torch.tensor([prompt])
        for _ in range(64):
            step = lm(input_ids=step, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - begun
    finally:
        lm.set_attn_implementation("agentcompact")


def bench_batching(model: LoadedModel) -> dict[str, float]:
    """16 questions together, against one by one, from a 16x cache of 2,048 tokens."""
    engine = TransformersEngine(model)
    cache = engine.prefill(tokens_of(engine, 2048), capture_seed=0)
    cache = make_strategy("two_pass").compact(CompactionRequest(engine, cache, 128)).cache
    places = ["harbour", "lighthouse", "town hall", "warehouse", "chapel", "market", "quay", "school"]
    questions = [f"What happened at the {place}?" for place in places] + [
        f"Who was last seen near the {place} and why?" for place in places
    ]
    sampling = SamplingSettings(max_new_tokens=32)
    together, single = [], []
    for _ in range(3):
        together.append(seconds(lambda: answer(engine, cache, questions, sampling=sampling)))
        single.append(seconds(lambda: [answer(engine, cache, question, sampling=sampling) for question in questions]))
    return {"16 questions batched / one by one": ratio(together, single)}


def bench_loading(model: LoadedModel) -> dict[str, float]:
    """First token of an answer from the saved 8x cache of 4,096 tokens, against prefilling the document again."""
    engine = TransformersEngine(model)
    ids = tokens_of(engine, 4096)
    sampling = SamplingSettings(max_new_tokens=1)
    question = engine.encode("\nQuestion: what happened?\nAnswer:")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.kv"
        cache = engine.prefill(ids, capture_seed=0)
        make_strategy("two_pass").compact(CompactionRequest(engine, cache, 512)).cache.save(path)

        def from_file() -> None:
            engine.decode(CompactedCache.load(path, model), [question], sampling)

        def again() -> None:
            engine.decode(engine.prefill(ids), [question], sampling)

        loads, prefills = [], []
        for _ in range(3):
            loads.append(seconds(from_file))
            prefills.append(seconds(again))
    return {
        "load the cache file and give the first token, seconds": statistics.median(loads),
        "prefill the document again / load the cache file, to the first token": ratio(prefills, loads),
    }


def bench_memory(_: LoadedModel) -> dict[str, float]:
    """Peak memory of a process of its own that compacts 8,000 tokens."""
    peaks = {}
    for name in ("two_pass", "high_attn"):
        made = subprocess.run(
            [sys.executable, __file__, "--peak", name],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ},
        )
        peaks[f"peak memory of {name} at 16x of 8,000 tokens, GB"] = float(made.stdout)
    return peaks


BLOCKS = ((32_000, 1_024), (32_000, 4_096), (32_000, 8_192), (8_192, 4_096), (16_000, 4_096))
"""Tokens of the context and of a block."""


def bench_blocks(_: LoadedModel) -> dict[str, float]:
    """Memory that compacting long contexts in blocks takes beyond the model, each in a process of its own."""
    peaks = {}
    for tokens, block in BLOCKS:
        command = [sys.executable, __file__, "--blocks", f"{tokens}:{block}", *model_arguments()]
        made = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        peaks[f"{tokens:,} tokens in blocks of {block:,}, MB beyond the model"] = float(made.stdout)
    return peaks


def model_arguments() -> list[str]:
    """The --model that this process was given, for its children."""
    return sys.argv[sys.argv.index("--model") :][:2] if "--model" in sys.argv else []


def print_block_peak(tokens: int, block: int, name: str | None) -> None:
    """Print what two_pass at 16x takes beyond the loaded model, in MB; a small random model where none is named."""
    model = load_model(name, dtype="float32", device="cpu") if name else random_model()
    engine = TransformersEngine(model)
    ids = tokens_of(engine, tokens)
    engine.prefill(ids[:64])  # what is made once
    loaded = resident_bytes("VmRSS")
    reset_peak()
    compact_in_blocks(make_strategy("two_pass"), engine, ids, block=block, ratio=16)
    print((peak_bytes() - loaded) / 1e6)


def random_model() -> LoadedModel:
    """A random Llama of four layers with wide keys and values, that reads 32,768 tokens by SmolLM2's tokenizer."""
    tokenizer = load_model("smollm2", dtype="float32", device="cpu").tokenizer
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 32_768}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)
    return wrap_model(LlamaForCausalLM(config).to(torch.float32), tokenizer, name="random")


def resident_bytes(field: str) -> int:
    """A memory figure of this process (Linux)."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def reset_peak() -> None:
    """Let the peak begin anew at what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def print_peak(strategy: str) -> None:
    engine = TransformersEngine(load_model("smollm2", dtype="float32", device="cpu"))
    cache = engine.prefill(tokens_of(engine, 8000), capture_seed=0)
    make_strategy(strategy).compact(CompactionRequest(engine, cache, 500))
    print(peak_bytes() / 1e9)


def peak_bytes() -> int:
    """Peak resident memory of this process; ru_maxrss would count the parent's too on Linux."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


BENCHMARKS = {
    "compaction": bench_compaction,
    "decoding": bench_decoding,
    "batching": bench_batching,
    "loading": bench_loading,
    "memory": bench_memory,
    "blocks": bench_blocks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="the model of the benchmark `blocks` (default: a small random one)")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print_peak(options.peak)
        return
    if options.blocks:
        tokens, block = options.blocks.split(":")
        print_block_peak(int(tokens), int(block), options.model)
        return
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    results: dict[str, float] = {}
    for name in options.names or BENCHMARKS:
        model = load_model("smollm2", dtype="float32", device="cpu")
        figures = BENCHMARKS[name](model)
        results.update(figures)
        if not options.json:
            for label, value in figures.items():
                print(f"{label:75s} {value:8.3f}", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
