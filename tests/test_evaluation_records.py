"""One's own documents: what is read, and what is said of lines that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcompact.errors import DocumentError
from agentcompact.evaluation import Document, Question, read_documents
from agentcompact.evaluation.records import to_lines

GOOD = {
    "id": "a",
    "task": "needles",
    "context": "The code is 4821.",
    "questions": [{"question": "\nWhat is it?", "answers": ["4821"], "options": [" 4821", " 1"], "label": 0}],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "own.jsonl"


def line(**changes):
    return json.dumps({**GOOD, **changes})


def question(**changes):
    return line(questions=[{**GOOD["questions"][0], **changes}])


def without(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


def test_what_is_written_is_read_again(path):
    documents = [
        Document(id="b", context="text\u2028 with ü", questions=(Question(question="q", answers=("x",)),)),
        Document(**GOOD),
        Document(
            id="c",
            context="t",
            length=7,
            questions=(Question(question="q", answers=("x", "y"), match="all", kind="path", max_new_tokens=3),),
        ),
    ]
    path.write_text(to_lines(documents) + "\n", encoding="utf-8")
    assert read_documents(path) == documents
    path.write_bytes(b"\xef\xbb\xbf" + to_lines(documents).replace("\n", "\r\n").encode())
    assert read_documents(path) == documents


def test_the_digest_tells_texts_apart():
    document = Document(**GOOD)
    assert document.digest == Document(**GOOD).digest
    for other in (
        {"context": "The code is 4822."},
        {"questions": [{**GOOD["questions"][0], "answers": ["48"]}]},
        {"id": "b"},
    ):
        assert document.digest != Document(**{**GOOD, **other}).digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: an object with id, context and questions is needed"),
        (without("context"), "line 2: context: is missing"),
        (without("questions"), "line 2: questions: is missing"),
        (without("id"), "line 2: id: is missing"),
        (line(context="  \n"), "line 2: context is blank"),
        (line(questions=[]), "line 2: questions: "),
        (line(contexts="x"), "line 2: contexts: is no field of the format"),
        (question(question=" "), "line 2: a question is blank"),
        (question(answers=[], options=[], label=None), "a question needs 'answers', or 'options' and 'label'"),
        (question(label=None), "'options' and 'label' belong together"),
        (question(label=2), "label 2 is none of the 2 options"),
        (question(answers=[""]), "line 2: questions[0].answers[0]: "),
        (line(context="half \ud800"), "line 2: context: a character of it is half of one, which no encoding has"),
        (question(match="some"), "line 2: questions[0].match: "),
        (question(answers="4821"), "line 2: questions[0].answers: "),
        (line(id="first"), "line 2: id 'first' is that of line 1 too"),
    ],
)
def test_a_malformed_line_is_named(path, text, said):
    path.write_text(line(id="first") + "\n" + text + "\n", encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read_documents(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_files_that_are_none(path, tmp_path):
    with pytest.raises(DocumentError, match="no such file"):
        read_documents(path)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_documents(tmp_path)
    path.write_bytes(b"\n\n")
    with pytest.raises(DocumentError, match="no documents"):
        read_documents(path)
    path.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_documents(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "line 2: not JSON that can be read"),
        (line(length=1)[:-1] + ', "x": ' + "1" * 5000 + "}", "line 2: not JSON that can be read"),
        (question(options=[" a", " \n"]), "an option of the question 'What is it?' is blank"),
        (question(label=True), "line 2: questions[0].label: "),
    ],
    ids=["brackets", "digits", "blank option", "label"],
)
def test_json_that_no_reader_takes(path, text, said):
    path.write_text(line(id="first") + "\n" + text + "\n", encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read_documents(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_example_of_ones_own_questions():
    documents = read_documents(Path(__file__).parent.parent / "examples" / "own_questions.jsonl")
    assert {document.task for document in documents} == {"handbook"}
    for document in documents:
        for each in document.questions:
            assert all(document.context.casefold().count(a.casefold()) == 1 for a in each.answers)
