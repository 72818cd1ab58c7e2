"""Where sessions are kept, and what can be done with one that is not open."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from agentcompact.errors import DocumentError, InputError, OutputExistsError, WriteError
from agentcompact.session.journal import DATABASE, SNAPSHOTS, holder_of, read_events
from agentcompact.session.messages import Message
from agentcompact.session.state import SessionState, replay

SESSIONS_VARIABLE = "AGENTCOMPACT_SESSIONS_DIR"
_NAME = re.compile(r"[\w][\w.\- ]{0,99}")


@dataclass(frozen=True)
class SessionInfo:
    """A session in the store. holder: the process that has it open, or None."""

    name: str
    model: str
    messages: int
    compactions: int
    changed: str
    nbytes: int
    holder: int | None


def sessions_root() -> Path:
    """The folder of all sessions: AGENTCOMPACT_SESSIONS_DIR, or the user's data folder; it is not created here."""
    override = os.environ.get(SESSIONS_VARIABLE, "").strip()
    return (
        Path(override).expanduser().absolute() if override else platformdirs.user_data_path("agentcompact") / "sessions"
    )


def session_folder(name: str) -> Path:
    """Return the folder of a session, there or not. Raises InputError for what cannot be a name."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise InputError(f"'{name}' is no name for a session: use letters, digits, dots, dashes and blanks")
    return sessions_root() / name


def session_names() -> list[str]:
    """Return the names of all sessions, the one that changed last first."""
    root = sessions_root()
    if not root.is_dir():
        return []
    databases = [path for path in root.glob(f"*/{DATABASE}") if path.is_file()]
    return [path.parent.name for path in sorted(databases, key=_changed, reverse=True)]


def session_info(name: str) -> SessionInfo:
    """Return what is known of a session. Raises DocumentError where there is none, or its journal is damaged."""
    folder = session_folder(name)
    events = read_events(folder)
    state = replay(events)
    return SessionInfo(
        name=name,
        model=str(state.created.get("model", "")),
        messages=len(state.messages),
        compactions=len(state.compactions),
        changed=events[-1].at if events else "",
        nbytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        holder=holder_of(folder),
    )


def read_session(name: str) -> SessionState:
    """Return the state of a session. Raises DocumentError where there is none, or its journal is damaged."""
    return replay(read_events(session_folder(name)))


def delete_session(name: str) -> None:
    """Delete a session, transcript and all. Raises DocumentError where there is none, InputError where it is open."""
    folder = session_folder(name)
    read_events(folder)
    holder = holder_of(folder)
    if holder is not None:
        raise InputError(f"the session {name} is open in process {holder}: close it there first")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise WriteError(f"the session {name} could not be deleted: {error.strerror or error}") from error


def copy_session(source: Path, name: str) -> Path:
    """Copy a session, open or not, under a new name. Raises OutputExistsError where there is one of that name."""
    target = session_folder(name)
    if target.exists():
        raise OutputExistsError(f"there is a session {name} already: choose another name")
    part = target.with_name(f".{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(source / SNAPSHOTS, part / SNAPSHOTS)
        with closing(sqlite3.connect(source / DATABASE)) as old, closing(sqlite3.connect(part / DATABASE)) as new:
            old.backup(new)
        part.rename(target)
    except (OSError, sqlite3.Error) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise WriteError(f"the session could not be copied to {target}: {error}") from error
    return target


def to_markdown(messages: Sequence[Message], title: str) -> str:
    """Write a transcript as Markdown."""
    lines = [f"# {title}", ""]
    for message in messages:
        who = f"{message.role} ({message.name})" if message.name else message.role
        lines += [f"## {who}", ""]
        if message.content:
            lines += [message.content, ""]
        for call in message.tool_calls:
            lines += [f"calls `{call.name}`", "", "```json", call.model_dump_json(indent=2), "```", ""]
    return "\n".join(lines)


def check_exists(name: str) -> None:
    """Raise DocumentError where there is no such session."""
    if not (session_folder(name) / DATABASE).is_file():
        near = ", ".join(session_names()[:5])
        raise DocumentError(f"there is no session {name}" + (f"; there are: {near}" if near else ""))


def _changed(path: Path) -> float:
    return max(each.stat().st_mtime for each in path.parent.glob(f"{DATABASE}*"))
