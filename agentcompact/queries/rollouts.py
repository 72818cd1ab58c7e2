"""Teacher rollouts: what the full cache answers to general requests, with its predictions and its queries.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026), section 3.5, equations 11 and 12. The paper
runs them one by one; here they share one span of the cache, in batches, which changes no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentcompact.cache import CompactedCache
from agentcompact.durations import TimeLeft
from agentcompact.engines import Engine, Progress
from agentcompact.settings import SamplingSettings

TOP = 20
POOL = 4096
PLACEHOLDER = 0
"""Fed in place of an end token while its id is not known; what the model makes of it is not used."""


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and its greedy answer; `ended`: whether an end token comes next."""

    prompt: list[int]
    tokens: list[int]
    ended: bool

    @property
    def steps(self) -> int:
        """Predictions T: the answer's tokens, and the end token where there is one."""
        return len(self.tokens) + int(self.ended)

    @property
    def read(self) -> int:
        """Tokens that the teacher reads, each with a query: prompt and answer, without an end token."""
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class Rollout:
    """One prompt and the teacher's greedy continuation, its end token included.

    top_ids, top_logits: (steps, k), the teacher's likeliest tokens. log_normalizer: (steps,), the log of the sum of
    exponentials of all logits, so that top_logits - log_normalizer are log-probabilities.
    """

    prompt: list[int]
    tokens: list[int]
    top_ids: Tensor
    top_logits: Tensor
    log_normalizer: Tensor

    @property
    def top_log_probabilities(self) -> Tensor:
        """(steps, k)."""
        return self.top_logits - self.log_normalizer[:, None]


@dataclass(frozen=True)
class Rollouts:
    """All rollouts of a document. queries: by full layer, (query_heads, positions, head_dim), a sample of positions.

    recited, recited_positions: how many items, and query positions of a layer, at the end are of recitations.
    """

    items: list[Rollout]
    queries: dict[int, Tensor]
    recited: int = 0
    recited_positions: int = 0

    @property
    def query_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.queries.values())

    def joined(self, recitations: Rollouts) -> Rollouts:
        """Return these rollouts and, behind them, some in which the text itself is repeated."""
        if not recitations.items:
            return self
        queries = {layer: torch.cat([own, recitations.queries[layer]], dim=1) for layer, own in self.queries.items()}
        positions = next((tensor.shape[1] for tensor in recitations.queries.values()), 0)
        return Rollouts([*self.items, *recitations.items], queries, len(recitations.items), positions)


def greedy_answers(
    engine: Engine,
    cache: CompactedCache,
    prompts: Sequence[list[int]],
    most_tokens: int,
    batch: int,
    progress: Progress | None = None,
    known: dict[int, Answer] | None = None,
    on_batch: Callable[[dict[int, Answer]], None] | None = None,
) -> list[Answer]:
    """Answer prompts greedily, up to `most_tokens` each, every one from its own fork of the cache (equation 11).

    prompts: token ids. batch: prompts answered together, those of like length. known: answers there are already, by
    the prompt's number. on_batch: called with all answers so far after each batch. The cache stays as it is; raises
    ContextLengthError where a prompt and its answer do not fit behind it.
    """
    answers = dict(known or {})
    sampling = SamplingSettings(max_new_tokens=most_tokens)
    shared = cache.fork(batch_size=1)
    order = sorted((n for n in range(len(prompts)) if n not in answers), key=lambda n: len(prompts[n]))
    left = TimeLeft()
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        read = engine.read_prompts(shared.fork(batch_size=len(part)), [prompts[n] for n in part], most_tokens)
        for number, made in zip(part, engine.decode_batch(read, sampling), strict=True):
            answers[number] = Answer(prompts[number], made.token_ids, made.finish_reason == "eos")
        if on_batch is not None:
            on_batch(answers)
        if progress is not None:
            progress(f"rollouts · {left.after(first + len(part), len(order))}", len(answers), len(prompts))
    return [answers[number] for number in range(len(prompts))]


@torch.no_grad()
def teacher_rollouts(
    engine: Engine,
    cache: CompactedCache,
    answers: Sequence[Answer],
    *,
    top: int = TOP,
    pool: int = POOL,
    batch: int = 8,
    progress: Progress | None = None,
) -> Rollouts:
    """Read the answers once more behind the cache, for the teacher's predictions and its queries (equation 12).

    top: tokens whose logits are kept at each step. pool: query positions kept, evenly spaced over those of all prompts
    and answers one after another. batch: answers read together.
    """
    kept = evenly_spaced(sum(answer.read for answer in answers), pool)
    starts = torch.tensor([0, *(answer.read for answer in answers)]).cumsum(0)
    gathered = _QueryPool(kept)
    shared = cache.fork(batch_size=1)
    items: dict[int, Rollout] = {}
    order = sorted(range(len(answers)), key=lambda number: answers[number].read)
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        gathered.expect([(int(starts[number]), answers[number]) for number in part])
        turns = [(answers[n].prompt, [*answers[n].tokens, *([PLACEHOLDER] if answers[n].ended else [])]) for n in part]
        for number, logits in zip(part, engine.forced_logits(shared, turns, gathered.take), strict=True):
            items[number] = _rollout(answers[number], logits, top)
        if progress is not None:
            progress("teacher's predictions", len(items), len(answers))
    return Rollouts([items[number] for number in range(len(answers))], gathered.queries)


def evenly_spaced(total: int, most: int) -> Tensor:
    """Return `most` of the numbers below `total`, evenly spaced from the first to the last; all where that is fewer."""
    if total <= most:
        return torch.arange(total)
    return torch.arange(most) * (total - 1) // max(1, most - 1)


def _rollout(answer: Answer, logits: Tensor, top: int) -> Rollout:
    """Keep of a teacher's logits (steps, vocabulary) what distillation needs."""
    best = logits.topk(min(top, logits.shape[1]), dim=1)
    end = [int(logits[-1].argmax())] if answer.ended else []
    return Rollout(answer.prompt, [*answer.tokens, *end], best.indices, best.values, logits.logsumexp(dim=1))


class _QueryPool:
    """Collects the queries of chosen positions, counted over all turns one after another."""

    def __init__(self, kept: Tensor) -> None:
        self._kept = kept
        self._slots = self._rows = self._places = kept[:0]
        self.queries: dict[int, Tensor] = {}

    def expect(self, turns: Sequence[tuple[int, Answer]]) -> None:
        """Say what the next batch holds: the number of the first position, and the answer, of each row."""
        slots, rows, places = [], [], []
        for row, (start, answer) in enumerate(turns):
            low, high = torch.searchsorted(self._kept, torch.tensor([start, start + answer.read])).tolist()
            slots.append(torch.arange(low, high))
            rows.append(torch.full((high - low,), row))
            length = answer.read + int(answer.ended)
            places.append(self._kept[low:high] - start - length)  # counted from the row's end: it is padded before
        self._slots, self._rows, self._places = (torch.cat(each) for each in (slots, rows, places))

    def take(self, layer: int, query: Tensor) -> None:
        """File a batch's queries (rows, query_heads, tokens, head_dim) of one layer."""
        store = self.queries.get(layer)
        if store is None:
            store = query.new_empty(query.shape[1], len(self._kept), query.shape[3])
            self.queries[layer] = store
        device = query.device
        picked = query[self._rows.to(device), :, self._places.to(device)].detach()
        store[:, self._slots.to(device)] = picked.transpose(0, 1)
