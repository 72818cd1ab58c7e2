"""Phonebook Lookup: names and numbers without a pattern, every entry of which may be asked for."""

from __future__ import annotations

import random
import string

from agentcompact.evaluation.records import Question
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import draw_unique

LETTERS, DIGITS = 10, 10
"""Characters of a name and of a number."""


class Phonebook(Task):
    """One entry a unit; names and numbers are unique, and nothing stands between entries."""

    name = "phonebook"
    summary = "phone numbers of ten digits under names of ten random letters"
    questions = 20

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        used: set[str] = set()
        entries = [
            (
                draw_unique(lambda: "".join(rng.choices(string.ascii_uppercase, k=LETTERS)), used),
                draw_unique(lambda: "".join(rng.choices(string.digits, k=DIGITS)), used),
            )
            for _ in range(units)
        ]
        context = "".join(f"The phone number of {name} is {number}." for name, number in entries)
        return context, [
            Question(question=f"\nQuestion: What is the phone number of {name}?\nAnswer:", answers=(number,))
            for name, number in rng.sample(entries, min(questions, units))
        ]
