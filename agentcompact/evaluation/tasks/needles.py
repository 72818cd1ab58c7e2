"""Needles: four secret numbers of cities in everyday sentences."""

from __future__ import annotations

import random

from agentcompact.evaluation.records import Question
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import digits, draw_unique, insert_needles

NEEDLES = 4

CITIES = (
    "Amsterdam", "Athens", "Bangkok", "Barcelona", "Berlin", "Boston", "Brussels", "Cairo", "Chicago", "Copenhagen",
    "Dublin", "Helsinki", "Istanbul", "Lisbon", "London", "Madrid", "Melbourne", "Montreal", "Moscow", "Mumbai",
    "Munich", "Nairobi", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Singapore", "Stockholm", "Sydney", "Tokyo",
    "Toronto", "Vienna", "Warsaw",
)  # fmt: skip

FILLER = (
    "The baker on the corner sells out of rye bread every Saturday.",
    "Somebody left a blue umbrella in the waiting room again.",
    "The lift is being serviced, so please take the stairs for now.",
    "Our neighbours planted tomatoes along the south wall this spring.",
    "The choir practises in the school hall on most evenings.",
    "A cyclist stopped to ask the way to the old mill.",
    "The printer on the second floor needs new paper quite often.",
    "Two cats were asleep on the warm roof of the garage.",
    "The market opens early when the weather is fine.",
    "Fresh snow had covered the playground by breakfast time.",
    "The ferry was late because of the fog in the bay.",
    "She keeps a jar of buttons on the kitchen shelf.",
)


class Needles(Task):
    """One filler sentence a unit; the four needles come on top of them, each at a place of its own."""

    name = "needles"
    summary = "four secret numbers of four digits in everyday sentences"
    questions = NEEDLES
    smallest = NEEDLES

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        used: set[str] = set()
        secrets = [(city, draw_unique(lambda: digits(rng, 4), used)) for city in rng.sample(CITIES, NEEDLES)]
        needles = [f"The secret number for {city} is {number}." for city, number in secrets]
        filler = [rng.choice(FILLER) for _ in range(units)]
        context = " ".join(insert_needles(rng, filler, needles))
        return context, [
            Question(
                question=f"\nQuestion: What is the secret number for {city}?\nAnswer: The secret number for {city} is",
                answers=(number,),
            )
            for city, number in rng.sample(secrets, min(questions, NEEDLES))
        ]
