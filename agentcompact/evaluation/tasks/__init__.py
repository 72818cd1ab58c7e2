"""Tasks that make documents with questions, by name."""

from __future__ import annotations

from collections.abc import Sequence

from agentcompact.errors import SettingsError
from agentcompact.evaluation.tasks import ruler_niah as niah
from agentcompact.evaluation.tasks.base import CountTokens, Task, generate_documents
from agentcompact.evaluation.tasks.needles import Needles
from agentcompact.evaluation.tasks.phonebook import Phonebook
from agentcompact.evaluation.tasks.records import Records
from agentcompact.evaluation.tasks.ruler_tracking import VariableTracking
from agentcompact.evaluation.tasks.ruler_words import CommonWords, FrequentWords
from agentcompact.evaluation.tasks.transcript import Transcript
from agentcompact.settings import suggestion

__all__ = ["GROUPS", "TASKS", "CountTokens", "Task", "generate_documents", "make_task", "resolve_tasks", "task_names"]

_RULER: tuple[type[Task], ...] = (
    niah.Single1,
    niah.Single2,
    niah.Single3,
    niah.MultiKey1,
    niah.MultiKey2,
    niah.MultiKey3,
    niah.MultiValue,
    niah.MultiQuery,
    VariableTracking,
    CommonWords,
    FrequentWords,
)

_OTHERS: tuple[type[Task], ...] = (Phonebook, Needles, Records, Transcript)

TASKS: dict[str, type[Task]] = {task.name: task for task in (*_OTHERS, *_RULER)}
"""Every task, by name."""

GROUPS: dict[str, tuple[str, ...]] = {"ruler": tuple(task.name for task in _RULER)}
"""Names that stand for several tasks. RULER's two tasks on question answering are left out: they need data sets."""


def task_names() -> list[str]:
    """The names of all tasks."""
    return list(TASKS)


def make_task(name: str) -> Task:
    """Return the task of a name; raises SettingsError that suggests the nearest name."""
    if name not in TASKS:
        known = [*TASKS, *GROUPS]
        raise SettingsError(f"no task '{name}'{suggestion(name, known)}; there are: {', '.join(known)}")
    return TASKS[name]()


def resolve_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks of names and of groups of names, in order, each of them once."""
    single = [member for name in names for member in GROUPS.get(name, (name,))]
    return [make_task(name) for name in dict.fromkeys(single)]
