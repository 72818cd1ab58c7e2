"""One error class per kind of thing that goes wrong, each with the exit code that a command ends with."""

from __future__ import annotations


class AgentCompactError(Exception):
    """Base of every error this library raises on purpose; its message is one line that says what to do."""

    exit_code = 1


class InputError(AgentCompactError):
    """Something that was handed in cannot be used (exit code 2)."""

    exit_code = 2


class DocumentError(InputError):
    """A document that does not exist, is empty, or is not UTF-8."""


class ContextLengthError(InputError):
    """A document or a conversation that is longer than the model's context."""


class BudgetError(InputError):
    """A ratio or a budget that no compaction can meet."""


class SettingsError(InputError):
    """A strategy, a setting or a value that does not exist."""


class OutputExistsError(InputError):
    """An output file that exists and may not be overwritten."""


class ModelNotFoundError(InputError):
    """A model that is not at the place named, or a hub that cannot be reached."""


class UnsupportedModelError(InputError):
    """A model whose attention cannot be compacted, refused by name with the reason."""


class CacheFileError(InputError):
    """A cache file that is damaged, of a newer version, or of another model."""


class WriterFileError(InputError):
    """A trained writer that is missing or damaged, or that does not fit the model or the budget."""


class TrainingError(InputError):
    """A corpus or settings that a writer cannot be trained with."""


class CacheError(AgentCompactError):
    """An operation that a cache cannot do in the state it is in."""


class AttentionImplementationError(CacheError):
    """A model that would read a compacted cache through an attention function that cannot see all of it."""


class CapabilityError(InputError):
    """A strategy that needs something the engine cannot give."""


class MemoryLimitError(InputError):
    """Work that needs more memory than there is."""


class EvaluationError(AgentCompactError):
    """Cells of an evaluation that failed; what could be measured is kept."""


class WriteError(AgentCompactError):
    """A file that could not be written (a full disk, a folder without write permission)."""


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks, to stand in one of ours."""
    return " ".join(str(error).split())
