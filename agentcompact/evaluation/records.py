"""Documents with questions: what is measured on, read from JSON lines or made by a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentcompact.errors import DocumentError

NonEmpty = Annotated[str, Field(min_length=1)]

ANSWER_TOKENS = 16
"""Tokens that an answer may take where a question does not say."""


class Question(BaseModel):
    """One question about a document.

    question: raw text that is appended to the context, the beginning of the answer included if one is given.
    answers: an answer counts when the generated text contains one of them ("any"), ignoring case; with "all" the score
    is the share of them that it contains. options, label: the option with the highest mean log-probability per token
    must be the labelled one. kind: what is asked about, for scores by kind.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: NonEmpty
    answers: tuple[NonEmpty, ...] = ()
    match: Literal["any", "all"] = "any"
    options: tuple[NonEmpty, ...] = ()
    label: int | None = Field(None, ge=0, strict=True)
    kind: str = ""
    max_new_tokens: int = Field(ANSWER_TOKENS, ge=1)

    @model_validator(mode="after")
    def _has_something_to_check(self) -> Question:
        if not self.answers and not self.options:
            raise ValueError("a question needs 'answers', or 'options' and 'label'")
        if bool(self.options) != (self.label is not None):
            raise ValueError("'options' and 'label' belong together: one of them is missing")
        if self.label is not None and self.label >= len(self.options):
            raise ValueError(f"label {self.label} is none of the {len(self.options)} options (the first is 0)")
        return self


class Document(BaseModel):
    """A context and questions about it. length: the tokens that a generator was asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: NonEmpty
    task: NonEmpty = "data"
    context: NonEmpty
    questions: Annotated[tuple[Question, ...], Field(min_length=1)]
    length: int | None = Field(None, ge=1)

    @property
    def digest(self) -> str:
        """A hash of the context and the questions, so that results are never taken for those of another text."""
        content = self.model_dump(mode="json", exclude={"length"})
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()


def read_documents(path: Path) -> list[Document]:
    """Read documents from a file of JSON lines.

    Raises DocumentError that names the line and what is missing or wrong in it, also for two documents of one id.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise DocumentError(f"no such file: {path}") from error
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 at byte {error.start:,}") from error
    documents: list[Document] = []
    places: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        document = _parse(line, f"{path} line {number}")
        if document.id in places:
            raise DocumentError(f"{path} line {number}: id '{document.id}' is that of line {places[document.id]} too")
        places[document.id] = number
        documents.append(document)
    if not documents:
        raise DocumentError(f"{path} has no documents: give one JSON object a line")
    return documents


def to_lines(documents: Iterable[Document]) -> str:
    """Write documents as JSON lines; what has its default value is left out."""
    rows = [document.model_dump(mode="json", exclude_defaults=True) for document in documents]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _parse(line: str, where: str) -> Document:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON: {error.msg} at character {error.pos + 1:,}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise DocumentError(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(content, dict):
        raise DocumentError(f"{where}: an object with id, context and questions is needed")
    try:
        document = Document(**content)
    except ValidationError as error:
        first = error.errors()[0]
        raise DocumentError(f"{where}: {_place(first['loc'])}{_reason(first)}") from error
    for name, text in (("context", document.context), *((q.question, q.question) for q in document.questions)):
        if not text.strip():
            raise DocumentError(f"{where}: {name if name == 'context' else 'a question'} is blank")
    for question in document.questions:
        if not all(option.strip() for option in question.options):
            raise DocumentError(f"{where}: an option of the question {question.question.strip()!r} is blank")
    return document


def _place(location: Sequence[int | str]) -> str:
    """Write where in an object something is wrong: questions[1].answers."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).lstrip(".") + ": " if parts else ""


def _reason(error: Any) -> str:
    """Write what is wrong, for people."""
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return "is no field of the format"
    if error["type"] == "string_unicode":
        return "a character of it is half of one, which no encoding has"
    message: str = error["msg"]
    return message.removeprefix("Value error, ")
