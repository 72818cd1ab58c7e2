"""Documents of a corpus, cut into windows: a context, and cues taken from anywhere in the window."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentcompact.errors import TrainingError
from agentcompact.training.settings import TrainingSettings

TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")


@dataclass(frozen=True)
class Cue:
    """Token ids that are read behind the context; the last `continuation` of them are predicted."""

    ids: list[int]
    continuation: int


@dataclass(frozen=True)
class Window:
    """Part of a document. ids: the context's tokens and those behind it."""

    document: str
    ids: list[int]
    context: int

    @property
    def context_ids(self) -> list[int]:
        return self.ids[: self.context]

    def cue(self, number: int, settings: TrainingSettings) -> Cue:
        """Return a cue with its continuation from anywhere in the window, by the seed and its number alone."""
        length = settings.cue + settings.continuation
        content = f"{settings.seed}|{self.document}|{self.ids[:8]}|{number}"
        start = random.Random(content).randrange(len(self.ids) - length + 1)
        return Cue(self.ids[start : start + length], settings.continuation)


@dataclass(frozen=True)
class Corpus:
    """Windows to train on and windows to measure on, of different documents."""

    train: list[Window]
    held_out: list[Window]

    @property
    def digest(self) -> str:
        """A hash of all windows."""
        content = json.dumps([[window.document, window.ids] for window in (*self.train, *self.held_out)])
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def read_texts(path: Path) -> list[tuple[str, str]]:
    """Return names and texts of a corpus: a folder of UTF-8 text files, or a JSONL file with a `text` a line.

    Raises TrainingError where there is none, or a line is no document.
    """
    if path.is_dir():
        files = [each for each in sorted(path.rglob("*")) if each.suffix in TEXT_ENDINGS and each.is_file()]
        texts = [(each.relative_to(path).as_posix(), each.read_text("utf-8", errors="replace")) for each in files]
    elif path.is_file():
        texts = [
            _record(path, number, line) for number, line in enumerate(path.open(encoding="utf-8"), 1) if line.strip()
        ]
    else:
        raise TrainingError(f"there is no corpus at {path}: name a folder of texts or a JSONL file")
    if len(texts) < 2:
        raise TrainingError(f"{path} holds {len(texts)} documents: at least two are needed, one of them to measure on")
    return texts


def _record(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
        text, name = record["text"], str(record.get("name", number))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrainingError(f"{path}, line {number}: no JSON object with a 'text'") from error
    if not isinstance(text, str):
        raise TrainingError(f"{path}, line {number}: its 'text' is no text")
    return f"{record.get('source', '')}:{name}", text


def cut_corpus(
    texts: Sequence[tuple[str, str]], encode: Callable[[str], list[int]], settings: TrainingSettings
) -> Corpus:
    """Tokenise documents and cut their windows; whole documents are held out, chosen by the seed.

    Raises TrainingError where fewer than two documents are long enough.
    """
    smallest = settings.context + settings.cue + settings.continuation
    largest = settings.context + max(settings.beyond, settings.cue + settings.continuation)
    documents = []
    for name, text in texts:
        ids = encode(text[: 12 * largest * settings.windows])
        if len(ids) >= smallest:
            count = max(1, min(settings.windows, len(ids) // largest))
            starts = [part * len(ids) // count for part in range(count)]
            documents.append([Window(name, ids[start : start + largest], settings.context) for start in starts])
    if len(documents) < 2:
        raise TrainingError(
            f"{len(documents)} of {len(texts)} documents have the {smallest:,} tokens that context and continuation "
            "need: at least two must; take longer texts or a smaller --context"
        )
    random.Random(f"{settings.seed}|split").shuffle(documents)
    held = min(len(documents) - 1, max(1, round(settings.held_out * len(documents))))
    enough = [[w for w in document if len(w.ids) >= smallest] for document in documents]
    train = [window for document in enough[held:] for window in document]
    random.Random(f"{settings.seed}|windows").shuffle(train)
    return Corpus(train[: settings.most_windows or None], [window for document in enough[:held] for window in document])
