"""What `ttt` costs on one document: its batches against the same work done one by one, and an update of each stage.

Run: python benchmarks/ttt_cost.py [DOCUMENT] [--model NAME] [--tokens 1000] [--prompts 32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from agentcompact import CompactedCache, TransformersEngine, load_model
from agentcompact.cache import PromptFormat
from agentcompact.engines import question_ids
from agentcompact.queries.rollout_prompts import read_prompt_bank
from agentcompact.queries.rollouts import greedy_answers, teacher_rollouts
from agentcompact.strategies import CompactionRequest
from agentcompact.strategies.base import Phases
from agentcompact.strategies.latent_state import Place, TrainingState
from agentcompact.strategies.latent_training import Training
from agentcompact.strategies.ttt import LatentCompaction, reconstruction_scores


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Return the median seconds of some runs."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def prefilled(engine: TransformersEngine, document: Path, tokens: int) -> tuple[CompactedCache, float]:
    """Return the cache of as many tokens of a text, repeated where it is shorter, and the seconds of its prefill."""
    ids = engine.encode(document.read_text(encoding="utf-8"))
    ids = (ids * -(-tokens // len(ids)))[:tokens]
    begun = time.perf_counter()
    cache = engine.prefill(ids)
    cache.metadata.prompt = PromptFormat()
    return cache, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", nargs="?", type=Path, default=Path("examples/harbour_audit.txt"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--ratio", type=int, default=16)
    asked = parser.parse_args()
    engine = TransformersEngine(load_model(asked.model))
    cache, prefill = prefilled(engine, asked.document, asked.tokens)
    print(f"prefill of {asked.tokens:,} tokens: {prefill:.2f} s")
    texts = read_prompt_bank().prompts(asked.prompts)
    prompts = [question_ids(engine, cache.metadata.prompt, text) for text in texts]
    greedy_answers(engine, cache, prompts[:1], 2, 1)
    together = seconds(lambda: greedy_answers(engine, cache, prompts, 24, 32))
    alone = seconds(lambda: greedy_answers(engine, cache, prompts, 24, 1))
    answers = greedy_answers(engine, cache, prompts, 24, 32)
    print(
        f"{len(prompts)} rollouts: {together:.2f} s in batches of 32, {alone:.2f} s one by one: {alone / together:.1f}x"
    )
    read = seconds(lambda: teacher_rollouts(engine, cache, answers))
    print(f"the teacher's predictions and queries: {read:.2f} s")
    rollouts = teacher_rollouts(engine, cache, answers)
    method = LatentCompaction()
    request = CompactionRequest(engine, cache, -(-asked.tokens // asked.ratio))
    full = [cache.source(index, 0, asked.tokens) for index, _ in cache.full_layers]
    begun = time.perf_counter()
    scores = reconstruction_scores(request, full)
    scored = time.perf_counter() - begun
    begun = time.perf_counter()
    chosen, frozen = method.select(request, full, rollouts, scores)
    print(f"scores {scored:.2f} s, selection {time.perf_counter() - begun:.2f} s")
    state = TrainingState(chosen, frozen, Place(run=""))
    training = Training(request, method.settings, rollouts, full, state, Phases(), lambda: None)
    fit = training.stage1_fit(range(1), 30)
    steps = iter(range(30))
    first = seconds(lambda: fit.step(next(steps)), 20)
    print(f"stage 1: {first * 1000:.1f} ms an update and layer, {first * len(full):.3f} s for {len(full)} layers")
    spans = training.trainable_spans()
    leaves = [leaf for span in spans for leaf in (span.keys, span.values, span.bias)]
    picks = training.stage2_picks(3)[0]
    training.stage2_gradient(spans, leaves, picks[:1])
    batch = seconds(lambda: training.stage2_gradient(spans, leaves, picks), 3)
    apart = seconds(lambda: [training.stage2_gradient(spans, leaves, [pick]) for pick in picks], 3)
    print(f"stage 2: {batch:.2f} s an update as one batch, {apart:.2f} s one by one: {apart / batch:.2f}x")
    paper = 480 / len(prompts) * (together + read) + 1000 * (first * len(full) + batch)
    print(f"the paper's schedule: about {paper / 60:.0f} min, {paper / prefill:,.0f} prefills")


if __name__ == "__main__":
    main()
