"""What self-study asks of a model about the text it has read, in our own wording."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

STATEMENTS: dict[str, tuple[str, ...]] = {
    "summarise": (
        "Summarise the text above in a few sentences.",
        "What is the text above about? Name its main points in order.",
        "Write a short summary of the second half of the text above.",
        "Explain the text above to someone who has not read it.",
    ),
    "aggregate": (
        "List the most important facts in the text above.",
        "Which people, places and things does the text above mention, and what is said of each?",
        "List all the numbers, dates and amounts in the text above and what each one stands for.",
        "Which decisions, results or problems does the text above report?",
    ),
    "structure": (
        "Write the main facts of the text above as a JSON object.",
        "Write the outline of the text above as nested JSON, with a key for each part.",
        "Write what happens in the text above as a JSON list, in order, one object for each event.",
        "Write everyone and everything named in the text above as a JSON object from name to description.",
    ),
}
"""By kind: requests whose answers restate the text."""

QUESTIONS: tuple[str, ...] = (
    "Write one question that the text above answers.",
    "Write a question about a detail in the first part of the text above.",
    "Write a question about a detail in the middle of the text above.",
    "Write a question about a detail near the end of the text above.",
    "Write an exam question about a number, a date or a name in the text above.",
    "Write a question that can only be answered by putting two parts of the text above together.",
    "Write a question about why something in the text above is as it is.",
    "Write a question that someone would ask who has to act on the text above.",
)
"""Requests for a question, which is then asked."""

FOCUSED_STATEMENTS: tuple[str, ...] = (
    "List everything that the text above says about this: {focus}",
    "Summarise the parts of the text above that have to do with this: {focus}",
    "Quote the passages of the text above that have to do with this: {focus}",
    "Write what the text above says about this as a JSON object: {focus}",
)
FOCUSED_QUESTIONS: tuple[str, ...] = (
    "Write a question that the text above answers, about this: {focus}",
    "Write a question about a detail in the text above that has to do with this: {focus}",
    "Write an exam question about a number, a date or a name in the text above, to do with this: {focus}",
)


STATEMENT_OPENINGS: tuple[str, ...] = ("The text", "1.", "{")
"""How the answers to each kind of `STATEMENTS` begin: a small model that begins on its own often says nothing."""
QUESTION_OPENINGS: tuple[str, ...] = ("What", "How many", "Who", "Why", "When")


@dataclass(frozen=True)
class StudyPrompt:
    """A request to the model and how its answer begins; where `asks`, the answer is a question that is asked next."""

    text: str
    opening: str
    asks: bool


def study_prompts(count: int, seed: int, focus: str | None = None) -> list[StudyPrompt]:
    """Return `count` prompts, every second one asking for a question, the others taking turns by kind.

    With a focus every second pair is about it. The seed decides the order; requests that are used up begin again,
    those for a question with another opening.
    """
    random, focus = Random(seed), (focus or "").strip() or None
    statements, questions = _shuffled(random, *STATEMENTS.values()), _shuffled(random, QUESTIONS)
    about, questions_about = _shuffled(random, FOCUSED_STATEMENTS), _shuffled(random, FOCUSED_QUESTIONS)
    openings = random.sample(QUESTION_OPENINGS, len(QUESTION_OPENINGS))
    chosen = []
    for number in range(count):
        pair, asks = divmod(number, 2)
        focused = focus is not None and pair % 2 == 0
        turn = pair // 2 if focus else pair
        texts = (questions_about if focused else questions) if asks else (about if focused else statements)
        opening = STATEMENT_OPENINGS[turn % len(STATEMENT_OPENINGS)]
        if asks or focused:
            opening = openings[pair % len(openings)] if asks else STATEMENT_OPENINGS[0]
        text = texts[turn % len(texts)]
        chosen.append(StudyPrompt(text.replace("{focus}", focus or ""), opening, bool(asks)))
    return chosen


def _shuffled(random: Random, *lists: tuple[str, ...]) -> list[str]:
    """Shuffle each list, and take one of each in turn."""
    return [text for texts in zip(*(random.sample(each, len(each)) for each in lists), strict=True) for text in texts]
