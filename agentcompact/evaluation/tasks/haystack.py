"""Text that needles are hidden in: a novel, and a few short sentences that repeat."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from importlib import resources

from agentcompact.evaluation.tasks.choices import draw_unique

NOISE = (
    "The lamp is lit.",
    "The road is dry.",
    "A cart rolls past.",
    "The wind has dropped.",
    "We wait a while.",
    "Then the cart comes back.",
)
"""Sentences that say nothing, and say it over and over."""

# A sentence ends at a full stop unless that belongs to a title, and the next one begins with a capital.
_SENTENCE_END = re.compile(
    r"""(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?:(?<=[.!?])|(?<=[.!?]["')]))\s+(?=["'(]*[A-Z])"""
)
_WORD = re.compile(r"(?<![\w'-])[a-z]{5,9}(?![\w'-])")
_SHORTEST_WORD = 5


@cache
def novel() -> str:
    """The text of the novel that comes with the package."""
    return (resources.files("agentcompact.evaluation") / "data" / "northanger_abbey.txt").read_text(encoding="utf-8")


@cache
def novel_sentences() -> tuple[str, ...]:
    """The sentences of the novel, in order."""
    lines = (" ".join(line.split()) for line in novel().splitlines())
    return tuple(sentence for line in lines if line for sentence in _SENTENCE_END.split(line))


@cache
def word_list() -> tuple[str, ...]:
    """The distinct lower-case words of 5 to 9 letters of the novel, sorted."""
    return tuple(sorted(set(_WORD.findall(novel().replace("--", " ")))))


def novel_text(rng: random.Random, count: int) -> list[str]:
    """So many sentences of the novel in order, from a random one on; after the last comes the first again."""
    sentences = novel_sentences()
    start = rng.randrange(len(sentences))
    return [sentences[(start + place) % len(sentences)] for place in range(count)]


def noise_text(count: int) -> list[str]:
    """So many of the short sentences, in order, repeated."""
    return [NOISE[place % len(NOISE)] for place in range(count)]


def word_keys(rng: random.Random) -> Callable[[], str]:
    """A source of keys of two words joined by a hyphen, none equal to another or contained in one."""
    words = word_list()
    keys: set[str] = set()
    inner: set[str] = set()

    def contained(key: str) -> list[str]:
        left, right = key.split("-")
        heads = [left[place:] for place in range(len(left) - _SHORTEST_WORD + 1)]
        tails = [right[:end] for end in range(_SHORTEST_WORD, len(right) + 1)]
        return [f"{head}-{tail}" for head in heads for tail in tails]

    def draw() -> str:
        while True:
            key = f"{rng.choice(words)}-{rng.choice(words)}"
            parts = contained(key)
            if key not in inner and not any(part in keys for part in parts):
                keys.add(key)
                inner.update(parts)
                return key

    return draw


def uuid_keys(rng: random.Random) -> Callable[[], str]:
    """A source of distinct UUIDs of version 4."""
    used: set[str] = set()

    def draw() -> str:
        text = f"{rng.getrandbits(128):032x}"
        variant = "89ab"[int(text[16], 16) % 4]
        return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"

    return lambda: draw_unique(draw, used)
