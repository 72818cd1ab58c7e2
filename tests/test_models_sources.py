"""Telling from a name where a model comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcompact.errors import InputError, ModelNotFoundError
from agentcompact.models import ModelSource, resolve_source


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_alias() -> None:
    assert resolve_source("smollm2") == ModelSource("embedded", "smollm2", None, "smollm2")


def test_alias_wins_over_a_folder_of_that_name(here: Path) -> None:
    (here / "smollm2").mkdir()
    assert resolve_source("smollm2").kind == "embedded"


def test_folder(here: Path) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text("{}")
    for name in ("model", "./model", str(here / "model")):
        assert resolve_source(name) == ModelSource("folder", name, here / "model", str(here / "model"))


def test_gguf_file(here: Path) -> None:
    (here / "a.GGUF").write_bytes(b"GGUF rest")
    source = resolve_source("a.GGUF")
    assert (source.kind, source.path) == ("gguf", here / "a.GGUF")


@pytest.mark.parametrize(
    ("name", "revision", "identity"),
    [
        ("gpt2", None, "gpt2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", None, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("owner/name.v1_x", "main", "owner/name.v1_x@main"),
    ],
)
def test_hub(name: str, revision: str | None, identity: str) -> None:
    assert resolve_source(name, revision=revision) == ModelSource("hub", name, None, identity)


@pytest.mark.parametrize(
    "name",
    ["./nothing", "../nothing", "/nothing/at/all", "~/nothing-at-all", "x/y/z", "missing.gguf", "~no~user~"],
)
@pytest.mark.usefixtures("here")
def test_missing_path_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no model file or folder"):
        resolve_source(name)


@pytest.mark.parametrize("name", ["", "  ", "a b", "-x", "owner/", "/", "o/n--x", "a..b", "x" * 5000, "é", "a\0b"])
@pytest.mark.usefixtures("here")
def test_impossible_names(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_source(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm", "SmolLM2", "smolm2", "smollm-2", "smollm2-135m"])
def test_near_misses_of_the_alias(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2'"):
        resolve_source(name)


def test_folder_without_config(here: Path) -> None:
    (here / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"'empty' has no config\.json"):
        resolve_source("empty")


def test_file_that_is_no_model(here: Path) -> None:
    (here / "book.txt").write_text("once upon a time")
    with pytest.raises(ModelNotFoundError, match=r"neither a \.gguf file nor a model folder"):
        resolve_source("book.txt")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04zip"])
def test_gguf_without_the_magic(here: Path, content: bytes) -> None:
    (here / "fake.gguf").write_bytes(content)
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve_source("fake.gguf")


def test_revision_is_for_the_hub_only(here: Path) -> None:
    (here / "config.json").write_text("{}")
    for name in ("smollm2", "."):
        with pytest.raises(InputError, match="revision"):
            resolve_source(name, revision="main")
