"""How many questions about the demo document are answered right, by strategy and ratio: the README's table.

    python benchmarks/demo_accuracy.py

An answer counts when one of the expected strings stands in its first 24 greedy tokens, ignoring case.
"""

from __future__ import annotations

import json
from pathlib import Path

from agentcompact import TransformersEngine, answer, load_model, prefill_document, recompact

EXAMPLES = Path(__file__).parent.parent / "examples"
THOROUGH = {"queries": "repeat_prefill", "budgets": "global"}
ROWS = [
    ("none", {}, [1]),
    ("streaming_llm", {}, [4, 8]),
    ("two_pass", {}, [4, 8]),
    ("two_pass", THOROUGH, [4, 8]),
    ("high_attn", {}, [4, 8]),
    ("kvzip", {}, [4, 8]),
    ("attention_matching", {}, [4, 8]),
]


def main() -> None:
    engine = TransformersEngine(load_model("smollm2", dtype="float32", device="cpu"))
    text = (EXAMPLES / "harbour_audit.txt").read_text(encoding="utf-8")
    lines = (EXAMPLES / "harbour_audit.questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    full = prefill_document(engine, text, capture_seed=0)
    print(f"{full.next_position} tokens, {len(questions)} questions", flush=True)
    for strategy, settings, ratios in ROWS:
        for ratio in ratios:
            cache = recompact(engine, full, strategy, ratio=ratio, **settings)
            made = answer(engine, cache, [each["question"] for each in questions], max_new_tokens=24)
            right = sum(
                any(text.lower() in answer.text.lower() for text in each["answers"])
                for each, answer in zip(questions, made, strict=True)
            )
            shown = " ".join(f"{name}={value}" for name, value in settings.items())
            print(f"{strategy:14s} {ratio:3d}x  {right:3d}  {shown}", flush=True)


if __name__ == "__main__":
    main()
