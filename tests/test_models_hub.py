"""Models of the hub, against servers on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from test_models_helpers import closed_address, loopback_server, save_tiny_llama, silent_server

from agentcompact.errors import ModelNotFoundError, UnsupportedModelError
from agentcompact.models import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/tiny-model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Point the hub's library at an address, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)

    def point(address: str) -> None:
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return point


def failure(name: str = REPO, **options: Any) -> tuple[str, float]:
    """The message of the ModelNotFoundError that loading ends in, and the seconds until then."""
    started = time.monotonic()
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(name, device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value), time.monotonic() - started


def serve_folder(folder: Path, hidden: tuple[str, ...] = ()) -> Any:
    """A hub that has one model, the files of `folder`; those in `hidden` are listed, but answer 404."""

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        files = sorted(file.name for file in folder.iterdir())
        if parts[:4] == ["api", "models", *REPO.split("/")]:
            if "tree" in parts:
                tree = [
                    {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40}
                    for name in files
                ]
                return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
            info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = parts[-1]
        if "resolve" not in parts or name not in files or name in hidden:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        content = (folder / name).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, content

    return loopback_server(answer)


def test_unreachable(hub: Any) -> None:
    hub(closed_address())
    message, seconds = failure()
    assert "the hub cannot be reached" in message
    assert seconds < 5


def test_server_that_never_answers(hub: Any) -> None:
    with silent_server() as address:
        hub(address)
        message, seconds = failure()
    assert "the hub cannot be reached" in message
    assert seconds < 10


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "RepoNotFound", f"the hub has no model '{REPO}'"),
        (401, "RepoNotFound", f"the hub has no model '{REPO}'"),
        (403, "GatedRepo", "accept the licence on its hub page, then set HF_TOKEN"),
        (404, "RevisionNotFound", "has no revision 'v9'"),
        (503, "", "the hub refused to give"),
    ],
)
def test_refusals_are_told_apart(hub: Any, status: int, code: str, expected: str) -> None:
    with loopback_server(lambda _path: (status, {"X-Error-Code": code} if code else {}, b"")) as (
        address,
        asked,
    ):
        hub(address)
        message, seconds = failure(revision="v9")
    assert expected in message
    assert seconds < 5
    assert len(asked) == 1


def test_gated_files_behind_open_metadata(hub: Any) -> None:
    info = {"id": REPO, "sha": COMMIT, "gated": "manual", "siblings": [{"rfilename": "config.json"}]}

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/models") and "/tree/" not in path:
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if path.startswith("/api/models"):
            tree = [{"type": "file", "path": "config.json", "size": 2, "oid": "0" * 40}]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        return 403, {"X-Error-Code": "GatedRepo"}, b""

    with loopback_server(answer) as (address, _asked):
        hub(address)
        message, _ = failure()
    assert "is gated" in message


def test_server_that_lists_files_and_then_hangs(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcompact.models.hub.REQUEST_SECONDS", 1.0)
    released = threading.Event()

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/models"):
            info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        released.wait(30)
        return 500, {}, b""

    with loopback_server(answer) as (address, _asked):
        hub(address)
        message, seconds = failure()
        released.set()
    assert "the hub cannot be reached" in message
    assert seconds < 5


def test_answer_that_is_not_json(hub: Any) -> None:
    with loopback_server(lambda _path: (200, {}, b"<html>please log in</html>")) as (address, _):
        hub(address)
        message, _seconds = failure()
    assert "makes no sense" in message


def test_offline_mode(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(closed_address())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message, _ = failure()
    assert "HF_HUB_OFFLINE is set" in message


def test_download_once_then_no_network(hub: Any, tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    lines: list[str] = []
    with serve_folder(folder) as (address, _asked):
        hub(address)
        first = load_model(REPO, device="cpu", progress=lines.append)
        assert any(line.startswith("downloading") for line in lines)
    hub(closed_address())
    again = load_model(REPO, device="cpu")
    assert first.source.kind == "hub"
    assert first.source.identity == REPO
    assert first.fingerprint == again.fingerprint == load_model(str(folder), device="cpu").fingerprint


def test_interrupted_download_is_taken_up_again(hub: Any, tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    with serve_folder(folder, hidden=("model.safetensors",)) as (address, _):
        hub(address)
        failure()
    with serve_folder(folder) as (address, _):
        hub(address)
        assert load_model(REPO, device="cpu").geometry.layers == 2


def test_unsupported_model_is_refused_before_its_weights_are_downloaded(hub: Any, tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with serve_folder(folder) as (address, asked):
        hub(address)
        with pytest.raises(UnsupportedModelError, match="'gpt2'"):
            load_model(REPO, device="cpu")
    assert any("config.json" in path for path in asked)
    assert not any("model.safetensors" in path for path in asked)


def test_repository_of_gguf_files(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "model-Q4.gguf").write_bytes(b"GGUF")
    with serve_folder(tmp_path / "repo") as (address, _):
        hub(address)
        message, _ = failure()
    assert "holds GGUF files only" in message
