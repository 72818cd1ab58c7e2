"""What a person sees while a command works: progress on standard error, results on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from agentcompact.durations import duration

DETAIL = " · "
"""What follows this in the name of a phase changes while it lasts: its loss, the time left."""
DETAIL_SECONDS = 30.0
"""Where there is no terminal, a phase's detail is written at most this often."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Work:
    """Shows the phases of long work: bars in a terminal, one line a phase elsewhere, nothing when quiet."""

    def __init__(self, progress: Progress | None, quiet: bool) -> None:
        self._progress = progress
        self._quiet = quiet
        self._task: TaskID | None = None
        self._phase = ""
        self._told = 0.0

    def say(self, message: str) -> None:
        """Name what is being done, without a measure."""
        self._begin(message, None)

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Report progress of a phase; the interface of `agentcompact.engines.Progress`."""
        name, _, detail = phase.partition(DETAIL)
        if name != self._phase:
            self._begin(name, total)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, description=phase)
        elif detail and not self._quiet and (done == total or time.monotonic() - self._told > DETAIL_SECONDS):
            self._told = time.monotonic()
            click.echo(f"{name} {done:,}/{total:,}: {detail}", err=True)

    def _begin(self, phase: str, total: int | None) -> None:
        self._phase, self._told = phase, time.monotonic()
        if self._progress is not None:
            self.finish()
            self._task = self._progress.add_task(phase, total=total)
        elif not self._quiet:
            click.echo(f"{phase} ({total:,})" if total else phase, err=True)

    def finish(self) -> None:
        """End the current phase's spinner or bar."""
        if self._progress is not None and self._task is not None:
            task = self._progress.tasks[self._progress.task_ids.index(self._task)]
            self._progress.update(self._task, total=task.total or 1, completed=task.total or 1)
            self._task = None


@contextmanager
def working(quiet: bool) -> Iterator[Work]:
    """Give a `Work` whose display ends with the block."""
    if quiet or not sys.stderr.isatty():
        yield Work(None, quiet)
        return
    progress = Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        work = Work(progress, quiet)
        yield work
        work.finish()


class Steps:
    """Shows steps of long work, each on a line of its own, and what is being done within one.

    In a terminal a bar with the time left stays below the lines, and below it the phase of the step.
    """

    def __init__(self, progress: Progress | None, quiet: bool) -> None:
        self._progress = progress
        self._quiet = quiet
        self._told = time.monotonic()
        self._phase = ""
        if progress is not None:
            self._all = progress.add_task("", total=None, left="")
            self._one = progress.add_task("", total=None, left="", visible=False)

    def __call__(self, done: int, total: int, what: str, seconds_left: float) -> None:
        """Show a step that was done."""
        left = f"about {duration(seconds_left)} left" if done < total else ""
        if self._progress is not None:
            self._progress.console.print(what, markup=False, overflow="fold")
            self._progress.update(self._all, completed=done, total=total, left=left)
            self._progress.update(self._one, visible=False)
        elif not self._quiet:
            click.echo(f"[{done}/{total}] {what}" + (f"; {left}" if left else ""), err=True)
        self._told = time.monotonic()

    def within(self, phase: str, done: int, total: int) -> None:
        """Show what the step is at; elsewhere than in a terminal only now and then."""
        name, _, detail = phase.partition(DETAIL)
        if self._progress is not None:
            if name != self._phase:
                self._progress.reset(self._one)
            self._phase = name
            self._progress.update(self._one, completed=done, total=total, left=phase, visible=True)
        elif not self._quiet and time.monotonic() - self._told > DETAIL_SECONDS:
            self._told = time.monotonic()
            click.echo(f"{name} {done:,}/{total:,}" + (f": {detail}" if detail else ""), err=True)


@contextmanager
def stepping(quiet: bool) -> Iterator[Steps]:
    """Give a `Steps` whose display ends with the block."""
    if quiet or not sys.stderr.isatty():
        yield Steps(None, quiet)
        return
    progress = Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        console=Console(stderr=True, highlight=False),
    )
    with progress:
        yield Steps(progress, quiet)


def print_json(data: Any) -> None:
    """Print one JSON document on standard output."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def warn(message: str) -> None:
    """Print one line on standard error."""
    click.echo(f"agentcompact: warning: {message}", err=True)


def size(count: float) -> str:
    """Write a number of bytes for people: 138.9 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
