"""Needles in a haystack, eight tasks of RULER (Hsieh et al. 2024): keys with special magic values, asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar, Literal

from agentcompact.evaluation.records import Question
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import digits, draw_unique, insert_needles
from agentcompact.evaluation.tasks.haystack import noise_text, novel_text, uuid_keys, word_keys

NUMBER_TOKENS, UUID_TOKENS, VALUES_TOKENS = 32, 48, 96
"""Tokens of an answer that is one number, one UUID, or several numbers."""


class NeedleTask(Task):
    """Hides values under keys. A unit is a sentence of the haystack, or a needle where it is made of needles.

    Every value is unique and stands in the context exactly once. Keys are unique; one stands there once for each of its
    values. Needles in a text come on top of its sentences, each at a place of its own.
    """

    haystack: ClassVar[Literal["noise", "novel", "needles"]] = "novel"
    key_kind: ClassVar[Literal["word", "uuid"]] = "word"
    value_kind: ClassVar[Literal["number", "uuid"]] = "number"
    keys: ClassVar[int] = 1
    """Keys that are hidden in a text; a haystack of needles has one a unit."""
    values: ClassVar[int] = 1
    """Values of each key."""
    keys_asked: ClassVar[int] = 1
    """Keys that one question asks for."""
    questions = 1

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        draw_key = word_keys(rng) if self.key_kind == "word" else uuid_keys(rng)
        draw_value = _values(rng) if self.value_kind == "number" else uuid_keys(rng)
        count = units if self.haystack == "needles" else self.keys
        hidden = [(draw_key(), [draw_value() for _ in range(self.values)]) for _ in range(count)]
        needles = [self._needle(key, value) for key, values in hidden for value in values]
        if self.haystack == "needles":
            sentences = needles
        else:
            text = noise_text(units) if self.haystack == "noise" else novel_text(rng, units)
            sentences = insert_needles(rng, text, needles)
        context = f"{self._instruction()}\n{' '.join(sentences)}"
        groups = min(questions, count // self.keys_asked)
        asked = rng.sample(hidden, groups * self.keys_asked)
        return context, [self._question(asked[group::groups]) for group in range(groups)]

    @property
    def _noun(self) -> str:
        return "number" if self.value_kind == "number" else "code"

    def _instruction(self) -> str:
        return (
            f"Special magic {self._noun}s are hidden in the text below, each of them under a name. Keep them in mind: "
            f"you will be asked for them after the text."
        )

    def _needle(self, key: str, value: str) -> str:
        if self.values > 1:
            return f"One of the special magic {self._noun}s for {key} is {value}."
        return f"The special magic {self._noun} for {key} is {value}."

    def _question(self, asked: list[tuple[str, list[str]]]) -> Question:
        names = [key for key, _ in asked]
        values = tuple(value for _, values in asked for value in values)
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        if len(values) > 1:
            subject, verb, are = f"special magic {self._noun}s for {listed}", "What are all the", "are"
        else:
            subject, verb, are = f"special magic {self._noun} for {listed}", "What is the", "is"
        one = UUID_TOKENS if self.value_kind == "uuid" else NUMBER_TOKENS
        return Question(
            question=f"\nQuestion: {verb} {subject}?\nAnswer: The {subject} {are}",
            answers=values,
            match="all" if len(values) > 1 else "any",
            max_new_tokens=VALUES_TOKENS if len(values) > 1 else one,
        )


def _values(rng: random.Random) -> Callable[[], str]:
    """A source of distinct numbers of seven digits."""
    used: set[str] = set()
    return lambda: draw_unique(lambda: digits(rng, 7), used)


class Single1(NeedleTask):
    name = "niah_single_1"
    summary = "RULER: one number under a word key, in repeated noise"
    haystack = "noise"


class Single2(NeedleTask):
    name = "niah_single_2"
    summary = "RULER: one number under a word key, in a novel"


class Single3(NeedleTask):
    name = "niah_single_3"
    summary = "RULER: one UUID under a word key, in a novel"
    value_kind = "uuid"


class MultiKey1(NeedleTask):
    name = "niah_multikey_1"
    summary = "RULER: four keys with a number each in a novel, one asked for at a time"
    keys = 4
    questions = 4
    smallest = 3


class MultiKey2(NeedleTask):
    name = "niah_multikey_2"
    summary = "RULER: nothing but word keys with a number each, one asked for at a time"
    haystack = "needles"
    questions = 4


class MultiKey3(NeedleTask):
    name = "niah_multikey_3"
    summary = "RULER: nothing but UUID keys with a UUID each, one asked for at a time"
    haystack = "needles"
    key_kind = "uuid"
    value_kind = "uuid"
    questions = 4


class MultiValue(NeedleTask):
    name = "niah_multivalue"
    summary = "RULER: four numbers under one word key in a novel, all asked for"
    values = 4
    smallest = 3


class MultiQuery(NeedleTask):
    name = "niah_multiquery"
    summary = "RULER: four keys with a number each in a novel, all asked for at once"
    keys = 4
    keys_asked = 4
    smallest = 3
