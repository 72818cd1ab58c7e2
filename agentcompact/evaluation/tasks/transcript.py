"""Transcript: an agent at work with a tool, asked for what summaries lose first."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from agentcompact.evaluation.records import Question
from agentcompact.evaluation.tasks import transcript_data as data
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import OPTIONS, choice_question, digits, draw_unique, pair_up, spread

ANSWER_TOKENS = 24

QUESTIONS = {
    "path": "Which file holds the code of the {subject}?",
    "command": "Which command was run to check the {subject}?",
    "number": "According to the tool, what was the {metric} of the {subject}?",
    "decision": "Which {topic} was chosen for the {subject}?",
    "correction": "After the user's correction, what is the {setting} of the {subject}?",
}
"""What is asked about, and how."""


class Facts(NamedTuple):
    """What a round tells about its subject."""

    subject: str
    path: str
    command: str
    metric: str
    number: str
    topic: str
    winner: str
    loser: str
    reason: str
    setting: str
    wrong: str
    right: str

    def answer(self, kind: str) -> str:
        """What a question of the kind is answered with."""
        return {
            "path": self.path,
            "command": self.command,
            "number": self.number,
            "decision": self.winner,
            "correction": self.right,
        }[kind]


class Transcript(Task):
    """A unit is a round about one subject, which no other round is about.

    Paths, commands, measured numbers and corrected values are unique and stand in the context exactly once. A decision
    stands in its own round once, but other rounds may decide the same. Wrong options come from the same document, for a
    decision from the choices there were; the value that a user corrected is always one of them.
    """

    name = "transcript"
    summary = "paths, commands, numbers, decisions and corrections of an agent's conversation, with options"
    questions = 15

    @property
    def largest(self) -> int:
        return len(data.AREAS) * len(data.COMPONENTS)

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        draw = _facts(rng)
        # Rounds that are not in the document lend their facts as options where it has too few.
        rounds = [draw() for _ in range(max(units, OPTIONS))]
        context = "\n".join(_tell(rng, facts) for facts in rounds[:units])
        return context, [
            _question(rng, rounds, index, kind) for index, kind in spread(rng, units, tuple(QUESTIONS), questions)
        ]


def _facts(rng: random.Random) -> Callable[[], Facts]:
    """A source of facts about subjects, each of them another one."""
    subjects = iter(pair_up(rng, data.AREAS, data.COMPONENTS))
    places = iter(pair_up(rng, data.FOLDERS, data.STEMS))
    used: set[str] = set()

    def number() -> str:
        return draw_unique(lambda: digits(rng, 4), used)

    def draw() -> Facts:
        folder, stem = next(places)
        path = f"{rng.choice(data.ROOTS)}/{folder}/{stem}_{rng.choice(data.TAILS)}.{rng.choice(data.ENDINGS)}"
        command = rng.choice(data.COMMANDS).format(
            folder=rng.choice(data.FOLDERS), stem=rng.choice(data.STEMS), number=number()
        )
        topic = rng.choice(tuple(data.DECISIONS))
        winner, loser = rng.sample(tuple(data.DECISIONS[topic]), 2)
        return Facts(
            subject=" ".join(next(subjects)),
            path=path,
            command=command,
            metric=rng.choice(data.METRICS),
            number=number(),
            topic=topic,
            winner=winner,
            loser=loser,
            reason=data.DECISIONS[topic][winner],
            setting=rng.choice(data.SETTINGS),
            wrong=number(),
            right=number(),
        )

    return draw


def _tell(rng: random.Random, facts: Facts) -> str:
    """Write a round."""
    fields = {**facts._asdict(), "small": str(rng.randint(2, 90))}

    def say(templates: tuple[str, ...]) -> str:
        return rng.choice(templates).format(**fields)

    lines = [
        f"User: {say(data.OPENINGS)}",
        f"Assistant: {say(data.LOCATED)} {say(data.RUN)}",
        f"Tool (shell): {say(data.OUTPUTS)}",
        f"Assistant: {say(data.DECIDED)} {say(data.PROPOSED)}",
        f"User: {say(data.CORRECTIONS)}",
        f"Assistant: {say(data.AGREED)}",
    ]
    if rng.random() < 0.4:
        remark, reply = rng.choice(data.SMALL_TALK)
        lines += [f"User: {remark}", f"Assistant: {reply}"]
    return "\n".join(lines)


def _question(rng: random.Random, rounds: list[Facts], index: int, kind: str) -> Question:
    facts = rounds[index]
    others = [other.answer(kind) for other in rng.sample(rounds, len(rounds)) if other is not facts]
    if kind == "decision":
        others = [facts.loser, *data.DECISIONS[facts.topic]]
    elif kind == "correction":
        others.insert(0, facts.wrong)
    return choice_question(
        rng,
        f"\nQuestion: {QUESTIONS[kind].format(**facts._asdict())}\nAnswer:",
        facts.answer(kind),
        others,
        kind=kind,
        max_new_tokens=ANSWER_TOKENS,
    )
