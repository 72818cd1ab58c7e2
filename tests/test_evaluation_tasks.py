"""What holds for the documents of every task: length, ids and questions, and that a seed repeats them."""

from __future__ import annotations

import random
import re

import pytest

from agentcompact.errors import BudgetError, SettingsError
from agentcompact.evaluation.tasks import GROUPS, TASKS, generate_documents, make_task, resolve_tasks, task_names
from agentcompact.evaluation.tasks.base import build_to_length

RULER = [
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
]
DEFAULT_QUESTIONS = {
    "phonebook": 20,
    "needles": 4,
    "records": 12,
    "transcript": 15,
    "niah_multikey_1": 4,
    "niah_multikey_2": 4,
    "niah_multikey_3": 4,
}


def quarter(text):
    """Four characters a token, which is near to what tokenizers give."""
    return len(text) // 4


def words(text):
    return len(text.split())


COUNTERS = [pytest.param(quarter, id="quarter"), pytest.param(words, id="words")]


def documents(name, length, *, count=2, seed=0, count_tokens=quarter, questions=None):
    return generate_documents(
        make_task(name), count=count, length=length, seed=seed, count_tokens=count_tokens, questions=questions
    )


@pytest.mark.parametrize("length", [500, 1000, 4000])
@pytest.mark.parametrize("count_tokens", COUNTERS)
@pytest.mark.parametrize("name", TASKS)
def test_length_is_kept(name, count_tokens, length):
    task = make_task(name)
    sizes = {}

    class Spy:
        """Notes the length of every trial, by its units."""

        largest, smallest = task.largest, task.smallest

        def build(self, rng, units, questions):
            built = task.build(rng, units, questions)
            sizes[units] = count_tokens(built[0])
            return built

    Spy.name = name
    context, _ = build_to_length(Spy(), f"{name}/{length}", length, task.questions, count_tokens)
    tokens = count_tokens(context)
    assert tokens <= length
    units = max(units for units, size in sizes.items() if size == tokens)
    assert tokens >= 0.98 * length or sizes[units + 1] > length


@pytest.mark.parametrize("name", TASKS)
def test_seed_repeats_documents_and_another_changes_them(name):
    first, second = documents(name, 1000, seed=7)
    assert [first, second] == documents(name, 1000, seed=7)
    assert first.context != second.context
    for other in documents(name, 1000, seed=8):
        assert other.context not in (first.context, second.context)
    assert documents(name, 1000, seed=7, count=1) == [first]


def test_state_of_the_global_generator_does_not_matter():
    random.seed(1)
    first = documents("transcript", 1000)
    random.seed(2)
    before = random.getstate()
    assert documents("transcript", 1000) == first
    assert random.getstate() == before


@pytest.mark.parametrize("name", TASKS)
def test_ids_and_fields(name):
    made = documents(name, 1000, count=3, seed=5)
    assert [document.id for document in made] == [f"{name}-1000-5-{index}" for index in range(3)]
    assert {document.task for document in made} == {name}
    assert {document.length for document in made} == {1000}


@pytest.mark.parametrize("length", [1000, 4000])
@pytest.mark.parametrize("name", TASKS)
def test_questions_have_their_form(name, length):
    for document in documents(name, length):
        assert len(document.questions) == DEFAULT_QUESTIONS.get(name, 1)
        assert len({question.question for question in document.questions}) == len(document.questions)
        for question in document.questions:
            assert re.fullmatch(r"\nQuestion: [^\n]+\?\nAnswer:( [^\n]*\S)?", question.question)
            assert len(set(question.answers)) == len(question.answers)
            assert all(answer in document.context for answer in question.answers)
            # An answer must not be read off the question.
            assert not any(answer in question.question for answer in question.answers)
            assert question.match == ("all" if len(question.answers) > 1 else "any")


@pytest.mark.parametrize("length", [500, 1000, 4000])
@pytest.mark.parametrize("name", ["records", "transcript"])
def test_options_have_the_answer_under_the_label(name, length):
    labels = set()
    for document in documents(name, length, count=4):
        for question in document.questions:
            assert len(set(question.options)) == 4
            assert all(re.fullmatch(r" \S(.*\S)?", option) for option in question.options)
            assert question.options[question.label] == f" {question.answers[0]}"
            labels.add(question.label)
    assert labels == {0, 1, 2, 3}


@pytest.mark.parametrize("name", TASKS)
def test_fewer_questions_on_demand(name):
    for document in documents(name, 1000, questions=1):
        assert len(document.questions) == 1


@pytest.mark.parametrize("name", TASKS)
def test_length_below_the_shortest_document_is_refused(name):
    with pytest.raises(BudgetError, match=rf"{name} cannot make a document of 5 tokens: .* at least \d+$"):
        documents(name, 5)


@pytest.mark.parametrize("name", ["records", "transcript", "cwe"])
def test_length_beyond_the_unique_units_is_refused(name):
    with pytest.raises(BudgetError, match=rf"{name} cannot make .* ask for a length of at most [\d,]+$") as caught:
        documents(name, 200_000, count=1)
    most = int(str(caught.value).rsplit(" ", 1)[1].replace(",", ""))
    [document] = documents(name, most, count=1)
    assert quarter(document.context) == most or quarter(document.context) >= 0.98 * most
    task = make_task(name)
    with pytest.raises(BudgetError, match="at most"):
        task.build(random.Random(0), task.largest + 1, 1)


@pytest.mark.parametrize("name", TASKS)
def test_smallest_document_can_be_built_and_none_below(name):
    task = make_task(name)
    context, questions = task.build(random.Random(0), task.smallest, task.questions)
    assert context
    assert questions
    with pytest.raises(BudgetError, match="at least"):
        task.build(random.Random(0), task.smallest - 1, task.questions)


@pytest.mark.parametrize("values", [{"count": 0}, {"questions": 0}])
def test_nothing_to_make_is_refused(values):
    with pytest.raises(SettingsError, match=r"=0 is too small"):
        documents("phonebook", 500, **values)


def test_names_groups_and_summaries():
    assert task_names() == ["phonebook", "needles", "records", "transcript", *RULER]
    assert list(GROUPS["ruler"]) == RULER
    for name, task in TASKS.items():
        assert task.name == name
        assert task.summary
        assert "\n" not in task.summary
        assert task.questions == DEFAULT_QUESTIONS.get(name, 1)


def test_groups_expand_in_order_without_duplicates():
    assert [task.name for task in resolve_tasks(["ruler"])] == RULER
    names = [task.name for task in resolve_tasks(["vt", "phonebook", "ruler", "phonebook"])]
    assert names == ["vt", "phonebook", *(name for name in RULER if name != "vt")]
    assert resolve_tasks([]) == []


@pytest.mark.parametrize(
    ("name", "near"), [("phonebok", "phonebook"), ("niah_single1", "niah_single_1"), ("rulr", "ruler")]
)
def test_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(SettingsError, match=f"no task '{name}', did you mean '{near}'"):
        resolve_tasks([name])
    with pytest.raises(SettingsError, match="there are: phonebook, "):
        make_task("zzzzzz")
