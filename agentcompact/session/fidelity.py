"""How much a compaction changed what the model would say next, measured on a few probes."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine, question_ids
from agentcompact.errors import CacheError, ContextLengthError
from agentcompact.fitting.continuation_fidelity import continuation_fidelity
from agentcompact.settings import SamplingSettings

PROMPTS = (
    "What have we talked about so far?",
    "Which names, numbers and decisions matter in what was said?",
)
"""Generic questions about the compacted span; the old cache's own answers are compared on."""
ANSWER_TOKENS = 12
TAIL_TOKENS = 64


class Fidelity(BaseModel):
    """Mean KL divergence of the next-token distributions in nats, and the share of tokens with the same likeliest one.

    tokens: how many distributions were compared. None where nothing could be compared.
    """

    kl: float | None = None
    top1: float | None = None
    tokens: int = 0


def measure_fidelity(
    engine: Engine, before: CompactedCache, after: CompactedCache, border: tuple[int, int], tail: Sequence[int]
) -> Fidelity:
    """Compare what follows from two caches of one conversation; both stay as they are.

    border: the position behind what was compacted, in the old cache and in the new one. tail: the token ids that
    follow there, which both caches read again. Counted as probe work.
    """
    full: list[Tensor] = []
    other: list[Tensor] = []
    with engine.counters.as_probe():
        if tail:
            try:
                pair = [
                    _behind(engine, *each, tail[:TAIL_TOKENS]) for each in zip((before, after), border, strict=True)
                ]
            except CacheError:  # sliding windows may not reach back that far
                pair = []
            if pair:
                full.append(pair[0])
                other.append(pair[1])
        for prompt in PROMPTS:
            try:
                ids, answer = _answered(engine, before, prompt)
                if answer:
                    full.append(_continued(engine, before, ids, answer))
                    other.append(_continued(engine, after, ids, answer))
            except ContextLengthError:  # no room behind the old cache
                break
    kl, top1 = continuation_fidelity(full, other[: len(full)])
    return Fidelity(kl=kl, top1=top1, tokens=sum(len(each) for each in full))


def _behind(engine: Engine, cache: CompactedCache, position: int, ids: Sequence[int]) -> Tensor:
    fork = cache.fork()
    fork.truncate(position)
    return engine.next_token_logits(fork, ids)


def _answered(engine: Engine, cache: CompactedCache, prompt: str) -> tuple[list[int], list[int]]:
    """Return a question's token ids and the first tokens of the cache's answer to it."""
    ids = question_ids(engine, cache.metadata.prompt, prompt)
    (made,) = engine.decode(cache.fork(batch_size=1), [ids], SamplingSettings(max_new_tokens=ANSWER_TOKENS))
    return ids, made.token_ids


def _continued(engine: Engine, cache: CompactedCache, ids: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return the logits that predict each token of the answer."""
    logits = engine.next_token_logits(cache.fork(batch_size=1), [*ids, *answer])
    return logits[len(ids) - 1 : -1]
