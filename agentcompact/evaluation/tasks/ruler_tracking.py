"""Variable tracking, a task of RULER (Hsieh et al. 2024): a value handed on from variable to variable."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from agentcompact.evaluation.records import Question
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import digits, draw_unique, insert_needles
from agentcompact.evaluation.tasks.haystack import noise_text

HOPS = 4
INSTRUCTION = (
    "Assignments to variables are hidden in the text below. Follow them: you will be asked after the text which "
    "variables hold a given value."
)


class VariableTracking(Task):
    """One sentence of noise a unit; the assignments come on top of them, in order, each at a place of its own.

    One chain of four hops: five variables that all hold one value. The value stands in the context once, the last
    variable once and every other one twice. One question a document, for there is one chain.
    """

    name = "vt"
    summary = "RULER: five variables that hold one value through a chain of assignments, in repeated noise"
    questions = 1
    smallest = HOPS

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        used: set[str] = set()
        names = [draw_unique(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), used) for _ in range(HOPS + 1)]
        value = digits(rng, 5)
        steps = [f"VAR {names[0]} = {value}."]
        steps += [f"VAR {name} = VAR {source}." for source, name in pairwise(names)]
        text = insert_needles(rng, noise_text(units), steps, in_order=True)
        question = Question(
            question=f"\nQuestion: What are the names of the {len(names)} variables that hold the value {value}, "
            "directly or through another variable?\n"
            f"Answer: The names of the {len(names)} variables that hold {value} are",
            answers=tuple(names),
            match="all",
            max_new_tokens=30,
        )
        return f"{INSTRUCTION}\n{' '.join(text)}", [question]
