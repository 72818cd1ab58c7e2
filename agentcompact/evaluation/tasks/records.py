"""Records: patients of a hospital, with a ward, a room and a drug each."""

from __future__ import annotations

import random
from typing import NamedTuple

from agentcompact.evaluation.records import ANSWER_TOKENS, Question
from agentcompact.evaluation.tasks.base import Task
from agentcompact.evaluation.tasks.choices import OPTIONS, choice_question, pair_up, spread

FIRST_NAMES = (
    "Adele", "Bruno", "Carmen", "Desmond", "Elodie", "Farid", "Greta", "Hamish", "Imogen", "Jasper", "Kiran", "Leonie",
    "Mateo", "Nadia", "Orson", "Petra", "Quincy", "Renata", "Stellan", "Tamsin", "Ulrich", "Violeta", "Wesley",
    "Ximena", "Yolanda", "Zoltan", "Bettina", "Casper", "Dagmar", "Emeka",
)  # fmt: skip
LAST_NAMES = (
    "Abernathy", "Bakker", "Castellano", "Delacroix", "Engstrom", "Fairweather", "Grunwald", "Hathaway", "Ibarra",
    "Jankowski", "Kessler", "Lombardi", "Mwangi", "Nakagawa", "Oyelaran", "Pemberton", "Quintero", "Rasmussen",
    "Steinberg", "Thackeray", "Underwood", "Vandermeer", "Whitlock", "Yamamoto", "Zielinski", "Beaumont", "Calloway",
    "Drummond", "Eastwood", "Fitzroy",
)  # fmt: skip
WARDS = (
    "cardiology", "neurology", "oncology", "nephrology", "dermatology", "gastroenterology", "endocrinology",
    "hematology", "rheumatology", "orthopedics", "geriatrics", "ophthalmology",
)  # fmt: skip
CONDITIONS = (
    "chest pain", "a persistent cough", "severe dizziness", "a broken wrist", "high fever", "chronic fatigue",
    "stomach cramps", "blurred vision", "swollen joints", "a skin rash", "low blood pressure", "sudden weight loss",
    "back pain", "an irregular pulse", "kidney stones", "recurring headaches",
)  # fmt: skip
DRUGS = (
    "ibuprofen", "lisinopril", "omeprazole", "prednisone", "gabapentin", "losartan", "sertraline", "doxycycline",
    "furosemide", "naproxen", "tramadol", "cetirizine", "ramipril", "clopidogrel", "allopurinol", "diazepam",
)  # fmt: skip
DOSES = (5, 10, 15, 20, 25, 40, 50, 75, 100, 200, 250, 400, 500)
ROOMS = tuple(room for room in range(101, 1000) if room not in DOSES)
NEUTRAL = (
    "The night was quiet, and breakfast was eaten without complaint.",
    "Relatives telephoned in the afternoon and were told that all was well.",
    "A short walk along the corridor went better than expected.",
    "The papers were signed and put away by the nurse in charge.",
    "Visitors brought flowers and stayed until the evening round.",
    "Sleep came easily, and the next morning brought no surprises.",
    "The physiotherapist looked in and was pleased with the progress.",
    "A book from the trolley helped to pass the long afternoon.",
)

QUESTIONS = {
    "ward": "\nQuestion: To which ward was {name} admitted?\nAnswer:",
    "room": "\nQuestion: In which room was {name} placed?\nAnswer: Room",
    "drug": "\nQuestion: Which drug was prescribed to {name}?\nAnswer:",
}
"""What is asked about, and how."""


class Patient(NamedTuple):
    """What a record says that can be asked for, and its text."""

    name: str
    ward: str
    room: str
    drug: str
    text: str


class Records(Task):
    """One patient a unit. Names and rooms are unique, and no room is a dose; wards and drugs may come again."""

    name = "records"
    summary = "wards, rooms and drugs of hospital patients, with options"
    questions = 12

    @property
    def largest(self) -> int:
        return min(len(ROOMS), len(FIRST_NAMES) * len(LAST_NAMES))

    def build(self, rng: random.Random, units: int, questions: int) -> tuple[str, list[Question]]:
        self.check_units(units)
        names = [" ".join(pair) for pair in pair_up(rng, FIRST_NAMES, LAST_NAMES)]
        rooms = list(ROOMS)
        rng.shuffle(rooms)
        # Patients that are not in the document lend their rooms as options where it has too few.
        patients = [_patient(rng, names[i], str(rooms[i])) for i in range(max(units, OPTIONS))]
        context = "\n".join(patient.text for patient in patients[:units])
        return context, [
            _question(rng, patients[index], kind, patients)
            for index, kind in spread(rng, units, tuple(QUESTIONS), questions)
        ]


def _patient(rng: random.Random, name: str, room: str) -> Patient:
    ward, drug = rng.choice(WARDS), rng.choice(DRUGS)
    text = (
        f"{name}, {rng.randint(18, 94)} years of age, was admitted to the {ward} ward because of "
        f"{rng.choice(CONDITIONS)} and was placed in room {room}. There the doctor on duty prescribed {drug}, "
        f"{rng.choice(DOSES)} mg a day. {rng.choice(NEUTRAL)}"
    )
    return Patient(name, ward, room, drug, text)


def _question(rng: random.Random, patient: Patient, kind: str, patients: list[Patient]) -> Question:
    answer: str = getattr(patient, kind)
    pool = {"ward": WARDS, "drug": DRUGS, "room": tuple(other.room for other in patients)}[kind]
    return choice_question(
        rng,
        QUESTIONS[kind].format(name=patient.name),
        answer,
        rng.sample(pool, len(pool)),
        kind=kind,
        max_new_tokens=ANSWER_TOKENS,
    )
