"""Fixtures: tiny random models of several architectures, and the embedded model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model in float32; converted on first use into the user's cache directory."""
    from agentcompact import load_model

    return load_model("smollm2", dtype="float32", device="cpu")


@pytest.fixture
def document() -> str:
    return (EXAMPLES / "harbour_audit.txt").read_text(encoding="utf-8")


@pytest.fixture
def no_network():
    """Refuses every socket but those inside this machine's processes, which asyncio needs."""
    from pytest_socket import disable_socket, enable_socket

    disable_socket(allow_unix_socket=True)
    yield
    enable_socket()
