"""Keep other libraries' chatter off the terminal, and turn their long errors into one line."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

_QUIET = threading.RLock()


@contextmanager
def quiet_transformers(*, streams: bool = False) -> Iterator[None]:
    """Silence transformers' log lines, progress bars and warnings inside the block; restore them after it.

    Args:
        streams: also swallow what Python code prints to stdout and stderr, for the converters whose
            progress bars have no switch. Exceptions pass through either way.
    """
    with _QUIET:  # all of this is state of the process: one thread at a time changes it and puts it back
        yield from _quieted(streams)


def _quieted(streams: bool) -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if streams:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    yield
            else:
                yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def quiet_hub(*, bars: bool = False) -> Iterator[None]:
    """Silence the log lines of the hub's library inside the block, and restore them after it.

    Args:
        bars: leave its progress bars on.
    """
    verbosity = hub_logging.get_verbosity()
    switch_bars = not bars and not are_progress_bars_disabled()
    hub_logging.set_verbosity(hub_logging.CRITICAL)
    if switch_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if switch_bars:
            enable_progress_bars()


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """The first line with text in it of an error's message, cut to `limit` characters.

    An error without a message gives its class name.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
