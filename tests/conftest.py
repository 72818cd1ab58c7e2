"""Fixtures: tiny random models of several architectures, and the embedded model."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers: a thread for each, and for the processes that they begin
    os.environ.setdefault("OMP_NUM_THREADS", "1")

EXAMPLES = Path(__file__).parent.parent / "examples"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model in float32; converted on first use into the user's cache directory."""
    from agentcompact import load_model

    return load_model("smollm2", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A tiny model's folder."""
    from tiny import saved, tiny_model

    return saved(tiny_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def document() -> str:
    return (EXAMPLES / "harbour_audit.txt").read_text(encoding="utf-8")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run `agentcompact ARGS` in this process and a folder of its own; return (exit code, stdout, stderr)."""
    from agentcompact_cli import main as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTCOMPACT_SESSIONS_DIR", str(tmp_path / "sessions"))

    def call(*args, stdin=None):
        monkeypatch.setattr(sys, "argv", ["agentcompact", *map(str, args)])
        if stdin is not None:
            data = stdin if isinstance(stdin, bytes) else stdin.encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = command._run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def no_network():
    """Refuses every socket but those inside this machine's processes, which asyncio needs."""
    from pytest_socket import disable_socket, enable_socket

    disable_socket(allow_unix_socket=True)
    yield
    enable_socket()


@pytest.fixture
def one_thread(monkeypatch):
    """What is to be the same bit for bit is computed on one thread, here and in processes begun here."""
    import torch

    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
