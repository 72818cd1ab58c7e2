"""Compact a document once, keep it in a file, and answer questions from it: the library in twenty lines.

python examples/compact_and_ask.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from agentcompact import CompactedCache, answer, compact, generation_inputs, load_model

HERE = Path(__file__).parent

model = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
document = (HERE / "harbour_audit.txt").read_text(encoding="utf-8")

cache = compact(model, document, ratio=4)
report = cache.metadata.reports[-1]
print(f"{report.tokens} tokens: {report.entries_before} entries -> {report.entries_after}")

with tempfile.TemporaryDirectory() as folder:
    path = cache.save(Path(folder) / "harbour_audit.kv")
    cache = CompactedCache.load(path, model)

questions = ["What was the name of the lighthouse keeper's cat?", "Where was the hearing held?"]
for question, made in zip(questions, answer(model, cache, questions, max_new_tokens=24), strict=True):
    print(f"{question} {made.text.strip()}")

# The cache is a transformers cache: plain generation continues it. A fork keeps the original as it is.
ids = model.tokenizer("\nThe auditor was called", return_tensors="pt").input_ids.to(model.device)
continued = model.causal_lm.generate(**generation_inputs(cache.fork(), ids), max_new_tokens=8, do_sample=False)
print(model.tokenizer.decode(continued[0]).strip())
