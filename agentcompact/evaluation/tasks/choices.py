"""What several tasks share: unique draws, questions spread over kinds, options, and sentences in other sentences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agentcompact.evaluation.records import Question

OPTIONS = 4
"""Options of a question that has any."""


def draw_unique(draw: Callable[[], str], used: set[str]) -> str:
    """Draw until something comes that is not used yet, and mark it as used."""
    while True:
        value = draw()
        if value not in used:
            used.add(value)
            return value


def digits(rng: random.Random, count: int) -> str:
    """A number of so many digits, the first of them not 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def pair_up(rng: random.Random, first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs of a first and a second word, shuffled so that a word seldom comes again soon."""
    lefts, rights = rng.sample(first, len(first)), rng.sample(second, len(second))
    return [
        (left, rights[(place + shift) % len(rights)])
        for shift in range(len(rights))
        for place, left in enumerate(lefts)
    ]


def spread(rng: random.Random, subjects: int, kinds: Sequence[str], count: int) -> list[tuple[int, str]]:
    """Choose up to `count` distinct pairs of a subject and a kind: kinds in turn, the least asked subject for each."""
    order = rng.sample(range(subjects), subjects)
    times = dict.fromkeys(order, 0)
    pairs: dict[tuple[int, str], None] = {}
    for turn in range(min(count, subjects * len(kinds))):
        kind = kinds[turn % len(kinds)]
        subject = min((subject for subject in order if (subject, kind) not in pairs), key=times.__getitem__)
        times[subject] += 1
        pairs[subject, kind] = None
    return list(pairs)


def choice_question(
    rng: random.Random, question: str, answer: str, distractors: Sequence[str], *, kind: str, max_new_tokens: int
) -> Question:
    """A question with its answer among options, the first three of the distractors being the others."""
    options = [answer, *list(dict.fromkeys(text for text in distractors if text != answer))[: OPTIONS - 1]]
    rng.shuffle(options)
    return Question(
        question=question,
        answers=(answer,),
        options=tuple(f" {option}" for option in options),
        label=options.index(answer),
        kind=kind,
        max_new_tokens=max_new_tokens,
    )


def insert_needles(
    rng: random.Random, sentences: Sequence[str], needles: Sequence[str], *, in_order: bool = False
) -> list[str]:
    """Put each needle at a place of its own between the sentences, before the first or after the last."""
    places = rng.sample(range(len(sentences) + 1), len(needles))
    if in_order:
        places.sort()
    at = dict(zip(places, needles, strict=True))
    text = []
    for place in range(len(sentences) + 1):
        if place in at:
            text.append(at[place])
        if place < len(sentences):
            text.append(sentences[place])
    return text
