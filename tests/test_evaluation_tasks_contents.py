"""What the documents of each task say: unique keys, answers as often as promised, and wordings that are fixed."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import permutations, product

import pytest

from agentcompact.evaluation.tasks import generate_documents, make_task, transcript_data
from agentcompact.evaluation.tasks import records as records_task
from agentcompact.evaluation.tasks.choices import pair_up, spread
from agentcompact.evaluation.tasks.haystack import NOISE, novel_sentences, word_keys, word_list
from agentcompact.evaluation.tasks.needles import CITIES, FILLER
from agentcompact.evaluation.tasks.ruler_words import code_counts

LENGTHS = [pytest.param(length, id=str(length)) for length in (500, 1000, 4000)]
WORD_KEY = r"[a-z]{5,9}-[a-z]{5,9}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def documents(name, length, **settings):
    return generate_documents(
        make_task(name), count=2, length=length, seed=3, count_tokens=lambda text: len(text) // 4, **settings
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_phonebook(length):
    for document in documents("phonebook", length):
        assert re.fullmatch(r"(The phone number of [A-Z]{10} is \d{10}\.)+", document.context)
        entries = dict(re.findall(r"of ([A-Z]{10}) is (\d{10})\.", document.context))
        assert len(entries) == document.context.count("The phone") == len(set(entries.values()))
        for question in document.questions:
            name = re.fullmatch(
                r"\nQuestion: What is the phone number of ([A-Z]{10})\?\nAnswer:", question.question
            ).group(1)
            assert question.answers == (entries[name],)
            assert document.context.count(entries[name]) == document.context.count(name) == 1
            assert question.kind == ""


def test_phonebook_asks_for_all_entries_where_it_has_few():
    _, questions = make_task("phonebook").build(random.Random(0), 3, 20)
    assert len({question.question for question in questions}) == 3


@pytest.mark.parametrize("length", LENGTHS)
def test_needles(length):
    for document in documents("needles", length):
        secrets = re.findall(r"(?:^|(?<=\. ))The secret number for ([A-Z][a-z]+) is (\d{4})\.", document.context)
        assert len({city for city, _ in secrets}) == len({number for _, number in secrets}) == 4
        filler = re.sub(r"The secret number for \w+ is \d{4}\.", "", document.context)
        assert set(re.findall(r"[A-Z][^.]+\.", filler)) <= set(FILLER)
        asked = {}
        for question in document.questions:
            pattern = r"\nQuestion: What is the secret number for (\w+)\?\nAnswer: The secret number for \1 is"
            city = re.fullmatch(pattern, question.question).group(1)
            asked[city] = question.answers[0]
            assert document.context.count(city) == document.context.count(question.answers[0]) == 1
        assert asked == dict(secrets)


@pytest.mark.parametrize("length", LENGTHS)
def test_records(length):
    for document in documents("records", length):
        rows = [
            re.match(r"([A-Z]\w+ [A-Z]\w+), .* the (\w+) ward .* in room (\d{3})\. .* prescribed (\w+), (\d+) mg", row)
            for row in document.context.split("\n")
        ]
        patients = {row[1]: {"ward": row[2], "room": row[3], "drug": row[4]} for row in rows}
        rooms = {patient["room"] for patient in patients.values()}
        assert len(patients) == len(rooms) == len(rows)
        asked = Counter()
        for question in document.questions:
            name = next(name for name in patients if name in question.question)
            answer = patients[name][question.kind]
            assert question.question == records_task.QUESTIONS[question.kind].format(name=name)
            assert question.answers == (answer,)
            assert document.context.count(name) == 1
            if question.kind == "room":
                assert document.context.count(answer) == 1
                if len(rooms) >= 4:
                    assert {option.strip() for option in question.options} <= rooms
            asked[name] += 1
        assert Counter(question.kind for question in document.questions) == {"ward": 4, "room": 4, "drug": 4}
        if len(patients) >= 12:
            assert set(asked.values()) == {1}


def test_no_answer_of_a_pool_is_contained_in_another():
    pools = [records_task.WARDS, records_task.DRUGS, CITIES, *map(tuple, transcript_data.DECISIONS.values())]
    for pool in pools:
        assert not [pair for pair in permutations(pool, 2) if pair[0].lower() in pair[1].lower()]
    assert all(len(pool) == 4 for pool in transcript_data.DECISIONS.values())


NIAH = {
    "niah_single_1": (WORD_KEY, r"\d{7}", 1),
    "niah_single_2": (WORD_KEY, r"\d{7}", 1),
    "niah_single_3": (WORD_KEY, UUID, 1),
    "niah_multikey_1": (WORD_KEY, r"\d{7}", 4),
    "niah_multikey_2": (WORD_KEY, r"\d{7}", None),
    "niah_multikey_3": (UUID, UUID, None),
    "niah_multivalue": (WORD_KEY, r"\d{7}", 4),
    "niah_multiquery": (WORD_KEY, r"\d{7}", 4),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NIAH)
def test_niah(name, length):
    key_form, value_form, count = NIAH[name]
    for document in documents(name, length):
        _, text = document.context.split("\n")
        needles = re.findall(rf"special magic (?:number|code)s? for ({key_form}) is ({value_form})\.", text)
        keys = {key for key, _ in needles}
        assert len(needles) == text.count("special magic") == len({value for _, value in needles})
        assert len(needles) == (count or text.count(".")) >= 1
        assert len(keys) == (1 if name == "niah_multivalue" else len(needles))
        for question in document.questions:
            asked, begun = question.question.split("\nAnswer: ")
            wanted = {value for key, value in needles if f" {key}" in asked}
            assert set(question.answers) == wanted
            assert len(wanted) == (4 if name in ("niah_multivalue", "niah_multiquery") else 1)
            assert all(document.context.count(value) == 1 for value in wanted)
            assert all((key in asked) == (key in begun) for key in keys)
            assert begun.endswith((" is", " are"))
            assert question.max_new_tokens == (96 if len(wanted) == 4 else 48 if value_form == UUID else 32)
        for key in keys:
            assert text.count(key) == (4 if name == "niah_multivalue" else 1)


def test_haystacks():
    noise = documents("niah_single_1", 1000)[0].context
    assert re.sub(r"The special magic number for \S+ is \d+\. ?", "", noise).count(" ".join(NOISE)) > 10
    novel = documents("niah_single_2", 1000)[0].context.split("\n")[1]
    parts = re.split(r" ?The special magic number for \S+ is \d+\. ?", novel)
    assert all(part in " ".join(novel_sentences()) for part in parts)


def test_word_list():
    words = word_list()
    assert len(words) > 3000
    assert list(words) == sorted(set(words))
    assert all(re.fullmatch(r"[a-z]{5,9}", word) for word in words)
    assert not any(sentence.endswith((" Mr.", " Mrs.", " Dr.", " St.")) for sentence in novel_sentences())


def test_word_keys_are_not_contained_in_one_another(monkeypatch):
    words = ("other", "another", "mother", "night", "nightly", "nights")
    monkeypatch.setattr("agentcompact.evaluation.tasks.haystack.word_list", lambda: words)
    for seed in range(20):
        draw = word_keys(random.Random(seed))
        keys = [draw() for _ in range(6)]
        assert not [pair for pair in permutations(keys, 2) if pair[0] in pair[1]]


@pytest.mark.parametrize("length", LENGTHS)
def test_variable_tracking(length):
    for document in documents("vt", length):
        steps = re.findall(r"VAR ([A-Z]{5}) = (VAR [A-Z]{5}|\d{5})\.", document.context)
        [question] = document.questions
        names = [name for name, _ in steps]
        assert question.answers == tuple(names)
        assert len(set(names)) == 5
        assert [source for _, source in steps[1:]] == [f"VAR {name}" for name in names[:-1]]
        assert steps[0][1] in question.question
        assert [document.context.count(name) for name in (*names, steps[0][1])] == [2, 2, 2, 2, 1, 1]
        assert question.max_new_tokens == 30


@pytest.mark.parametrize("units", [24, 100, 209, 210, 700, 3000, make_task("cwe").largest])
def test_common_words(units):
    context, [question] = make_task("cwe").build(random.Random(units), units, 1)
    lines = re.findall(r"(\d+)\. ([a-z]+)", context.split("\n")[1])
    assert [int(number) for number, _ in lines] == list(range(1, 3 * units + 1))
    counts = Counter(word for _, word in lines)
    often, seldom = (30, 3) if units >= 210 else (6, 1)
    assert len(question.answers) == 10
    assert {counts.pop(word) for word in question.answers} == {often}
    assert set(counts.values()) == {seldom}
    assert not any(answer in word for word in counts for answer in question.answers)
    assert question.max_new_tokens == 120


@pytest.mark.parametrize("length", LENGTHS)
def test_frequent_words(length):
    for document in documents("fwe", length):
        counts = Counter(document.context.split("\n")[1].split()).most_common()
        [question] = document.questions
        assert counts[0][0] == "..."
        assert question.answers == tuple(word for word, _ in counts[1:4])
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in counts[1:])
        assert question.max_new_tokens == 50


def test_frequent_words_are_never_tied():
    for total in range(make_task("fwe").smallest, 3000):
        counts = code_counts(total)
        assert sum(counts) == total
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]


@pytest.mark.parametrize("length", LENGTHS)
def test_transcript(length):
    for document in documents("transcript", length):
        context = document.context
        assert context.startswith("User: ")
        assert "\nTool (shell): " in context
        subjects = {f"{area} {part}" for area in transcript_data.AREAS for part in transcript_data.COMPONENTS}
        told = [subject for subject in subjects if subject in context]
        asked = Counter(next(name for name in told if name in question.question) for question in document.questions)
        if len(told) >= 15:
            assert set(asked.values()) == {1}
        kinds = Counter(question.kind for question in document.questions)
        expected = -(-len(document.questions) // 5)
        assert kinds == dict.fromkeys(("path", "command", "number", "decision", "correction"), expected)
        for question in document.questions:
            assert question.max_new_tokens == 24
            assert question.question.endswith("?\nAnswer:")
            if question.kind != "decision":
                assert context.count(question.answers[0]) == 1
            if question.kind == "correction":
                wrong = [option.strip() for option in question.options if context.count(option.strip()) == 2]
                assert len(wrong) == 1
            elif question.kind != "decision" and len(told) >= 4:
                assert all(option.strip() in context for option in question.options)


def test_pairs_are_all_there_once():
    pairs = pair_up(random.Random(0), "abcde", "vwxyz")
    assert sorted(pairs) == list(product("abcde", "vwxyz"))
    assert all(len(set(side)) == 5 for side in zip(*pairs[:5], strict=True))


@pytest.mark.parametrize("subjects", [1, 2, 3, 5, 7, 8, 40])
@pytest.mark.parametrize("count", [1, 4, 12, 15])
def test_questions_are_spread_over_kinds_and_subjects(subjects, count):
    for kinds in ("abc", "abcde"):
        pairs = spread(random.Random(0), subjects, kinds, count)
        assert len(set(pairs)) == len(pairs) == min(count, subjects * len(kinds))
        for place, expected in ((0, subjects), (1, len(kinds))):
            times = Counter(pair[place] for pair in pairs)
            assert len(times) == min(expected, len(pairs))
            assert max(times.values()) - min(times.values()) <= 1


def test_transcript_facts_are_unique_in_the_longest_one():
    task = make_task("transcript")
    assert task.largest >= 400
    context, questions = task.build(random.Random(0), task.largest, 5 * task.largest)
    assert len(questions) == 5 * task.largest
    assert len({question.question for question in questions}) == len(questions)
    answers = [question.answers[0] for question in questions if question.kind != "decision"]
    assert len(set(answers)) == len(answers) == 4 * task.largest
    assert all(context.count(answer) == 1 for answer in answers)
