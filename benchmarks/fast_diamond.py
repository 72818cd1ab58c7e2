"""Measures a writer: held-out KL beside other strategies, KL after repeated applications, and compaction time.

    python benchmarks/fast_diamond.py kl --corpus corpus.jsonl --examples 40
    python benchmarks/fast_diamond.py rolling --corpus corpus.jsonl --documents 6
    python benchmarks/fast_diamond.py time

The held-out documents are those of the writer's own training, split again by its record from the same corpus file.
Numbers go to standard output as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from agentcompact import CompactionRequest, TransformersEngine, load_model, make_strategy
from agentcompact.cache import CompactedCache
from agentcompact.errors import DocumentError
from agentcompact.training import Corpus, TrainingSettings, cut_corpus, read_texts
from agentcompact.training.forward import hidden_states, logits_of
from agentcompact.training.objective import divergence
from agentcompact.writers import FastDiamond, WriterRecord, load_writer, shipped_writer

STRATEGIES = "fast_diamond,two_pass,high_attn,kvzip_plus,streaming_llm"
APPLICATIONS = 8


def main() -> None:
    arguments = _arguments()
    engine = TransformersEngine(load_model(arguments.model))
    writer, record = _writer(arguments.writer, engine)
    with torch.no_grad():
        if arguments.what == "time":
            result = measure_time(engine, record, arguments)
        else:
            settings = _settings(record, arguments)
            corpus = cut_corpus(read_texts(arguments.corpus), engine.encode, settings)
            measure = measure_kl if arguments.what == "kl" else measure_rolling
            result = measure(engine, corpus, settings, arguments)
    del writer
    json.dump(result, sys.stdout, indent=2)
    print()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kl", "rolling", "time"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--writer", help="the shipped one by default")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--skip", type=int, default=16, help="held-out windows that training itself measured on")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def _writer(path: str | None, engine: TransformersEngine) -> tuple[FastDiamond, WriterRecord]:
    found = shipped_writer(engine.model.fingerprint) if path is None else load_writer(Path(path))
    if found is None:
        raise DocumentError("no writer comes with the package for this model: give --writer")
    return found


def _settings(record: WriterRecord, arguments: argparse.Namespace) -> TrainingSettings:
    """Return the settings of the writer's training, with windows that are long enough for what is measured."""
    settings = TrainingSettings(writer=record.settings, **record.training["settings"])
    if arguments.what == "rolling":
        step = record.settings.context - record.settings.latents
        settings = settings.model_copy(update={"windows": 1, "beyond": (APPLICATIONS - 1) * step + 192})
    return settings


def _strategy(name: str, arguments: argparse.Namespace) -> object:
    settings = {"writer": arguments.writer} if name == "fast_diamond" and arguments.writer else {}
    return make_strategy(name, **settings)


def _continuation_logits(engine: TransformersEngine, cache: CompactedCache, ids: list[int], count: int) -> torch.Tensor:
    return logits_of(engine.model, hidden_states(engine.model, cache, ids[:-1])[-count:])


def measure_kl(
    engine: TransformersEngine, corpus: Corpus, settings: TrainingSettings, arguments: argparse.Namespace
) -> dict[str, object]:
    """KL to the full cache over KL without context, of each strategy at the writer's budget."""
    names = arguments.strategies.split(",")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    divergences: dict[str, list[float]] = {name: [] for name in names}
    without: list[float] = []
    windows = corpus.held_out[arguments.skip :]
    for number in range(arguments.examples):
        turn, place = divmod(number, len(windows))
        window = windows[place]
        cue = window.cue(turn, settings)
        full = engine.prefill(window.context_ids, capture_seed=0)
        teacher = _continuation_logits(engine, full.fork(), cue.ids, cue.continuation)
        nothing = float(
            divergence(teacher, _continuation_logits(engine, engine.new_cache(), cue.ids, cue.continuation))
        )
        without.append(nothing)
        for name in names:
            request = CompactionRequest(engine=engine, cache=full, budget=settings.writer.latents)
            small = _strategy(name, arguments).compact(request).cache
            value = float(divergence(teacher, _continuation_logits(engine, small, cue.ids, cue.continuation)))
            divergences[name].append(value)
            ratios[name].append(value / (nothing + 1e-6))
        print(
            number + 1, {name: round(statistics.mean(ratios[name]), 3) for name in names}, file=sys.stderr, flush=True
        )
    return {
        "examples": len(without),
        "no_context_kl": statistics.mean(without),
        "strategies": {
            name: {
                "mean_of_ratios": statistics.mean(ratios[name]),
                "median_of_ratios": statistics.median(ratios[name]),
                "ratio_of_means": sum(divergences[name]) / sum(without),
            }
            for name in names
        },
    }


def measure_rolling(
    engine: TransformersEngine, corpus: Corpus, settings: TrainingSettings, arguments: argparse.Namespace
) -> dict[str, object]:
    """KL over no-context KL on the tokens that follow, after 1 to 8 compactions of a growing text at one budget."""
    names = arguments.strategies.split(",")
    step, budget = settings.writer.context - settings.writer.latents, settings.writer.latents
    total = settings.writer.context + (APPLICATIONS - 1) * step
    texts = [window.ids for window in (*corpus.held_out, *corpus.train) if len(window.ids) >= total + 192]
    texts = texts[: arguments.documents]
    sums: dict[str, list[float]] = {name: [0.0] * APPLICATIONS for name in names}
    nothing = [0.0] * APPLICATIONS
    for ids in texts:
        full, caches, at = engine.new_cache(), {name: engine.new_cache() for name in names}, 0
        for turn in range(APPLICATIONS):
            stop = settings.writer.context + turn * step
            part, following = ids[at:stop], ids[stop : stop + 192]
            full, at = engine.prefill(part, full), stop
            teacher = _continuation_logits(engine, full.fork(), following, 128)
            nothing[turn] += float(
                divergence(teacher, _continuation_logits(engine, engine.new_cache(), following, 128))
            )
            for name in names:
                cache = engine.prefill(part, caches[name], capture_seed=0)
                request = CompactionRequest(engine=engine, cache=cache, budget=budget)
                caches[name] = _strategy(name, arguments).compact(request).cache
                logits = _continuation_logits(engine, caches[name].fork(), following, 128)
                sums[name][turn] += float(divergence(teacher, logits))
        print("document done", file=sys.stderr, flush=True)
    return {
        "documents": len(texts),
        "budget": budget,
        "tokens": [settings.writer.context + turn * step for turn in range(APPLICATIONS)],
        "ratio_of_means": {name: [a / b for a, b in zip(sums[name], nothing, strict=True)] for name in names},
    }


def measure_time(engine: TransformersEngine, record: WriterRecord, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds of prefill and compaction, in turns in one process; medians, and their quotient."""
    strategy = _strategy("fast_diamond", arguments)
    ids = torch.randint(10, 5000, (record.settings.context,), generator=torch.Generator().manual_seed(0)).tolist()
    prefill, compaction = [], []
    for _ in range(arguments.repeats + 1):
        begun = time.perf_counter()
        cache = engine.prefill(ids)
        read = time.perf_counter()
        strategy.compact(CompactionRequest(engine=engine, cache=cache, budget=record.settings.latents))
        prefill.append(read - begun)
        compaction.append(time.perf_counter() - read)
    prefill, compaction = prefill[1:], compaction[1:]  # the first finds the rotary embedding and reads the writer
    return {
        "threads": torch.get_num_threads(),
        "prefill_seconds": statistics.median(prefill),
        "compaction_seconds": statistics.median(compaction),
        "quotient": statistics.median(c / p for c, p in zip(compaction, prefill, strict=True)),
    }


if __name__ == "__main__":
    main()
