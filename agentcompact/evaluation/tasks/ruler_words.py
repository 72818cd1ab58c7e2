"""Word counting, two tasks of RULER (Hsieh et al. 2024): the most frequent words of a list and of a coded text."""

from __future__ import annotations

import random
import string

from agentcompact.evaluation.records import Question
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import draw_unique
from agentcompact.evaluation.tasks.haystack import word_list

COMMON = 10
"""Words of a list that come more often than the others."""
LINES = 3
"""Lines of the list that make one unit."""
LONG_LIST = 630
"""Lines from which a list is long."""
LONG, SHORT = (30, 3), (6, 1)
"""How often a common word comes and how often any other, in a long list and in a short one."""

ZETA_2 = 1.6449340668482264
"""The sum of 1 / n^2 over all n, which makes frequencies 1 / n^2 shares."""
CODE_LETTERS = 6
FREQUENT = 3
"""Coded words that are asked for."""
NOISE = "..."
"""Takes the first rank of the coded text, and says nothing."""


class CommonWords(Task):
    """A unit is three lines of a numbered list of words, the ten common ones and the others well mixed.

    Lists of 630 lines and more, about 4,000 tokens, have each common word 30 times and any other 3 times; shorter ones
    6 times and once. No word contains a common one. One question a document.
    """

    name = "cwe"
    summary = "RULER: the ten most common words of a long numbered list"
    questions = 1
    smallest = 24

    @property
    def largest(self) -> int:
        # Words that contain a common one are left out, so a few hundred are kept back.
        others = len(word_list()) - 300
        return (COMMON * LONG[0] + others * LONG[1]) // LINES

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        lines = units * LINES
        often, seldom = LONG if lines >= LONG_LIST else SHORT
        words = list(word_list())
        rng.shuffle(words)
        common: list[str] = []
        for word in words:
            if len(common) < COMMON and not any(word in other or other in word for other in common):
                common.append(word)
        free = [word for word in words if not any(other in word for other in common)]
        others = free[: (lines - COMMON * often) // seldom]
        listed = common * often + others * seldom
        rng.shuffle(listed)
        numbered = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
        instruction = (
            f"Below is a numbered list of words. {COMMON} of them come up much more often than all the others. Keep in "
            f"mind which: you will be asked for them after the list."
        )
        question = Question(
            question=f"\nQuestion: Which {COMMON} words come up most often in the list?\n"
            f"Answer: The {COMMON} words that come up most often are:",
            answers=tuple(common),
            match="all",
            max_new_tokens=120,
        )
        return f"{instruction}\n{numbered}", [question]


class FrequentWords(Task):
    """A unit is one coded word or one "..." of a text whose n-th most frequent item has about 1 / n^2 of it.

    The most frequent item is "...", and the three after it are asked for. Their counts differ, and no other coded word
    comes as often. What rounding leaves over goes to words that come once. One question a document.
    """

    name = "fwe"
    summary = "RULER: the three most frequent words of a coded text"
    questions = 1
    smallest = 80

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        counts = code_counts(units)
        used: set[str] = set()
        codes = [
            draw_unique(lambda: "".join(rng.choices(string.ascii_lowercase, k=CODE_LETTERS)), used) for _ in counts
        ]
        codes[0] = NOISE
        text = [code for code, count in zip(codes, counts, strict=True) for _ in range(count)]
        rng.shuffle(text)
        instruction = (
            f"Below is a text of coded words. The dots {NOISE} between them mean nothing. Keep in mind how often each "
            f"coded word comes up: you will be asked for the {FREQUENT} most frequent ones after the text."
        )
        question = Question(
            question="\nQuestion: Leaving out the dots, which three coded words come up most often in the text?\n"
            "Answer: The three most frequent coded words are:",
            answers=tuple(codes[1 : FREQUENT + 1]),
            match="all",
            max_new_tokens=50,
        )
        return f"{instruction}\n{' '.join(text)}", [question]


def code_counts(total: int) -> list[int]:
    """How often each item of a coded text of `total` items comes, the most frequent first."""
    counts: list[int] = []
    while (count := int(total / ZETA_2 / (len(counts) + 1) ** 2)) > 0:
        counts.append(count)
    return counts + [1] * (total - sum(counts))
