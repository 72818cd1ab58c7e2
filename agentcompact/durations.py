"""Times written for people, and how much of a long work is left."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    """Write a time for people: 45 s, 3 min, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class TimeLeft:
    """Tells how long the rest of a work takes that goes on as it went so far, from when this was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._begun

    def after(self, done: int, total: int) -> str:
        """Return "3 min left" once `done` steps (at least 1) of `total` are made."""
        return f"{duration(self.elapsed / done * (total - done))} left"
