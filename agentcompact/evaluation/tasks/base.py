"""The interface of a task, and how its documents come to the length asked for."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from agentcompact.errors import BudgetError, SettingsError
from agentcompact.evaluation.records import Document, Question

CountTokens = Callable[[str], int]

TOLERANCE = 0.02
"""Share of the length that a document may fall short where its task cannot make it longer."""


class Task(ABC):
    """Makes documents with questions from a seed, of about as many tokens as asked for.

    A document is made of units (entries, sentences, rounds), and its length is set by their number.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for the list of tasks."""
    questions: ClassVar[int]
    """Questions of a document, where nothing else is asked for."""
    smallest: ClassVar[int] = 1
    """Units that a document must have at least."""

    @property
    def largest(self) -> int | None:
        """Units that a document can have at most; None where there is no limit."""
        return None

    @abstractmethod
    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        """Return the context of a document of `units` units, and questions about it.

        The same generator state, units and questions give the same document, and one unit more gives a longer one.
        Fewer questions are returned where a document has no more to ask about. Raises BudgetError where the task cannot
        make so many units.
        """

    def check_units(self, units: int) -> None:
        """Raise BudgetError where the task cannot make a document of `units` units."""
        if units < self.smallest:
            raise BudgetError(f"{self.name} needs at least {self.smallest:,} units a document, not {units:,}")
        if self.largest is not None and units > self.largest:
            raise BudgetError(f"{self.name} can make at most {self.largest:,} unique units a document, not {units:,}")


def generate_documents(
    task: Task, *, count: int, length: int, seed: int, count_tokens: CountTokens, questions: int | None = None
) -> list[Document]:
    """Make `count` documents whose contexts have at most `length` tokens, with as many units as go into that.

    questions: asked about a document, the task's own number if None. Raises BudgetError where the length is too short
    or too long for the task.
    """
    asked = task.questions if questions is None else questions
    for name, number in (("count", count), ("questions", asked)):
        if number < 1:
            raise SettingsError(f"{name}={number} is too small: at least 1 is needed")
    documents = []
    for index in range(count):
        context, chosen = build_to_length(task, f"{task.name}/{length}/{seed}/{index}", length, asked, count_tokens)
        documents.append(
            Document(
                id=f"{task.name}-{length}-{seed}-{index}",
                task=task.name,
                context=context,
                questions=tuple(chosen),
                length=length,
            )
        )
    return documents


def build_to_length(
    task: Task, key: str, length: int, questions: int, count_tokens: CountTokens
) -> tuple[str, list[Question]]:
    """Build the longest document of the generator seeded by `key` that has at most `length` tokens.

    Raises BudgetError where the fewest units are too long, or the most units more than 2 % too short.
    """

    def build(units: int) -> tuple[str, list[Question]]:
        return task.build(random.Random(key), units, questions)

    def measure(units: int) -> int:
        return count_tokens(build(units)[0])

    fits, tokens = task.smallest, measure(task.smallest)
    if tokens > length:
        raise BudgetError(
            f"{task.name} cannot make a document of {length:,} tokens: its shortest has {tokens:,}; ask for a length "
            f"of at least {tokens:,}"
        )
    most, exceeds = task.largest, None
    while exceeds is None:
        if fits == most:
            if tokens < (1 - TOLERANCE) * length:
                raise BudgetError(
                    f"{task.name} cannot make a document of {length:,} tokens: its {most:,} unique units have "
                    f"{tokens:,}; ask for a length of at most {tokens:,}"
                )
            return build(fits)
        units = 2 * fits if most is None else min(2 * fits, most)
        measured = measure(units)
        if measured > length:
            exceeds = units
        else:
            fits, tokens = units, measured
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if measure(middle) <= length else (fits, middle)
    return build(fits)
