"""Options that several subcommands share, and how their values are read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentcompact.errors import DocumentError, SettingsError

if TYPE_CHECKING:
    from agentcompact import LoadedModel

Decorator = Callable[[Any], Any]


@dataclass(frozen=True)
class ModelChoice:
    """What the model options say: which model, and how to load it."""

    name: str | None
    revision: str | None
    dtype: str
    device: str
    trust_remote_code: bool

    def load(self, default: str, say: Callable[[str], None], made_in: str = "") -> LoadedModel:
        """Load the model that was named, or the default: a name, a path, or a hub's "NAME@REVISION".

        made_in: the number format of a cache to be read. float16 weights have a fingerprint of their own, so a cache
        made with them needs them again, where --dtype does not say otherwise.
        """
        from agentcompact.models import load_model

        name, revision, dtype = self.name, self.revision, self.dtype
        if name is None:
            name = default
            if not Path(default).exists():
                name, _, kept = default.partition("@")
                revision = revision or kept or None
        if dtype == "auto" and made_in == "float16":
            dtype = made_in
        return load_model(
            name,
            dtype=dtype,
            device=self.device,
            revision=revision,
            trust_remote_code=self.trust_remote_code,
            progress=say,
        )


def _with(*options: Decorator) -> Decorator:
    """Join option decorators into one; the first comes first in the help text."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --model and how it is loaded; the function gets them together as `choice`."""

    @wraps(function)
    def gathered(
        *args: Any,
        model: str | None,
        revision: str | None,
        dtype: str,
        device: str,
        trust_remote_code: bool,
        **rest: Any,
    ) -> Any:
        return function(*args, choice=ModelChoice(model, revision, dtype, device, trust_remote_code), **rest)

    with_options: Callable[..., Any] = _with(
        click.option("--model", "-m", help="smollm2 (embedded), a folder, a .gguf file, or a hub id."),
        click.option("--revision", help="Branch, tag or commit of a hub model."),
        click.option(
            "--dtype",
            default="auto",
            show_default=True,
            help="float32, bfloat16 or float16; auto is float32 on a CPU, bfloat16 on a GPU.",
        ),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            help="cpu, cuda, cuda:1, mps; auto takes a GPU if there is one.",
        ),
        click.option("--trust-remote-code", is_flag=True, help="Run code that a hub model brings along."),
    )(gathered)
    return with_options


output_options = _with(
    click.option("--quiet", "-q", is_flag=True, help="No progress; results and errors only."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; a value is JSON where it can be read as JSON, else text."""
    from agentcompact.settings import read_value

    settings: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise SettingsError(f"--set {pair}: write it as NAME=VALUE")
        settings[name.strip()] = read_value(value)
    return settings


def read_document(path: Path) -> str:
    """Read a UTF-8 text file, or standard input for "-".

    Raises DocumentError where there is no such file, it is empty, no text, or in another encoding.
    """
    name = "standard input" if str(path) == "-" else str(path)
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except FileNotFoundError as error:
        raise DocumentError(f"no such file: {path}") from error
    except IsADirectoryError as error:
        raise DocumentError(f"{path} is a folder: name a text file in it") from error
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}") from error
    text = decode_text(data, name)
    if "\0" in text:
        raise DocumentError(f"{name} is no text: it has a zero byte at offset {data.index(0):,}")
    if not text.strip():
        raise DocumentError(f"{name} is empty")
    return text


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8, without a byte order mark. Raises DocumentError that says which byte is none."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DocumentError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,} (line {line:,}); "
            "convert it first, for example with iconv -f latin1 -t utf-8"
        ) from error
