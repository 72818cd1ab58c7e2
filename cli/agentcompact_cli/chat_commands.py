"""The slash commands of a chat, one function each; the first line of its docstring is its help."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from agentcompact_cli.chat_view import print_context, report_line
from agentcompact_cli.options import parse_settings, read_document

if TYPE_CHECKING:
    from agentcompact_cli.chat_loop import Chat


Number = TypeVar("Number", int, float)


class Quit(Exception):  # noqa: N818 - it ends the loop, nothing is wrong
    """Ends the chat."""


def compact(chat: Chat, rest: str) -> None:
    """[focus ...]  compact now what is neither pinned nor kept"""
    report = chat.working(lambda progress: chat.session.compact(rest or None, progress))
    chat.say(report_line(report))
    for line in (*report.attempts, *report.warnings):
        chat.say(line)


def strategy(chat: Chat, rest: str) -> None:
    """[NAME [SETTING=VALUE ...]]  show or change the strategy"""
    if rest:
        try:
            name, *pairs = shlex.split(rest)
        except ValueError as error:
            raise click.UsageError(f"{rest} cannot be read: {error}") from error
        chat.session.configure(strategy=name, settings=parse_settings(tuple(pairs)))
    policy = chat.session.policy
    settings = " ".join(f"{name}={value}" for name, value in policy.settings.items())
    chat.say(f"strategy {policy.strategy} {settings}".rstrip() + f", {policy.ratio:g}x")


def ratio(chat: Chat, rest: str) -> None:
    """N  keep one entry for so many tokens"""
    chat.session.configure(ratio=_number(rest, "/ratio 4", float))
    chat.say(f"ratio {chat.session.policy.ratio:g}")


def context(chat: Chat, rest: str) -> None:
    """show what every message costs"""
    print_context(chat.session.message_table(), chat.session.status(), chat.session.policy)


def pin(chat: Chat, rest: str) -> None:
    """N  never compact message N; again to unpin it"""
    number = _number(rest, "/pin 3", int)
    pinned = chat.session.pin(number)
    chat.say(f"message {number} is {'pinned' if pinned else 'no longer pinned'}")


def undo(chat: Chat, rest: str) -> None:
    """take back the last compaction"""
    report = chat.session.undo()
    chat.say(f"undone: {report.tokens:,} tokens stand as they were, {report.held_before:,.0f} positions are held again")


def file(chat: Chat, rest: str) -> None:
    """PATH  put a document in front of your next message"""
    from agentcompact.errors import InputError

    if not rest:
        raise InputError("name a file: /file notes.txt")
    path = Path(rest.strip("'\"")).expanduser()
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no regular file")
    text = read_document(path)
    chat.attached.append(f"{path.name}:\n{text.strip()}")
    count = len(chat.session.engine.encode(text))
    chat.say(f"{path.name}: {count:,} tokens, goes along with your next message")


def auto(chat: Chat, rest: str) -> None:
    """on | off | TRIGGER  compact by itself; a trigger is 80%, 6000 or messages:40"""
    if rest in ("on", "off"):
        chat.session.configure(auto=rest == "on")
    elif rest:
        chat.session.configure(auto=True, trigger=rest)
    status = chat.session.status()
    chat.say(
        f"automatic compaction at {status.trigger:,} held positions" if status.auto else "automatic compaction is off"
    )


def save(chat: Chat, rest: str) -> None:
    """NAME  keep a copy of the session under a name"""
    from agentcompact.errors import InputError
    from agentcompact.session.store import copy_session

    if not rest:
        raise InputError("name the copy: /save harbour")
    if chat.session.journal.folder is None:
        raise InputError("this session is not kept on disk: start it without --no-save")
    chat.session.memory.save()
    copy_session(chat.session.journal.folder, rest)
    chat.say(f"saved as {rest}: agentcompact chat --session {shlex.quote(rest)}")


def load(chat: Chat, rest: str) -> None:
    """NAME  leave this session and go on with another"""
    from agentcompact.errors import InputError

    if not rest:
        raise InputError("name a session: /load harbour (see agentcompact sessions)")
    chat.open(rest, must_exist=True)
    chat.say(f"{rest}: {len(chat.session.messages)} messages")


def export(chat: Chat, rest: str) -> None:
    """FILE.md  write the transcript as Markdown"""
    from agentcompact.errors import InputError
    from agentcompact.files import atomic_output
    from agentcompact.session.store import to_markdown

    if not rest:
        raise InputError("name a file: /export talk.md")
    path = Path(rest).expanduser()
    with atomic_output(path, overwrite=False) as temporary:
        temporary.write_text(to_markdown(chat.session.messages, chat.name), encoding="utf-8")
    chat.say(f"wrote {path}")


def retry(chat: Chat, rest: str) -> None:
    """forget the last reply and ask for another"""
    chat.reply(again=True)


def clear(chat: Chat, rest: str) -> None:
    """begin anew behind the system message"""
    chat.session.clear()
    chat.say("cleared; the journal keeps what was said")


def show_help(chat: Chat, rest: str) -> None:
    """show this"""
    for name, function in COMMANDS.items():
        usage = (function.__doc__ or "").strip()
        arguments, gap, text = usage.partition("  ")
        shown = f"{name} {arguments}" if gap else name
        chat.say(f"  {shown:36s} {(text if gap else usage).strip()}")
    chat.say("Ctrl-C stops a reply or a compaction, Ctrl-D leaves; // begins a message with a slash.")


def leave(chat: Chat, rest: str) -> None:
    """leave; the session is kept"""
    raise Quit


COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    "/compact": compact,
    "/strategy": strategy,
    "/ratio": ratio,
    "/context": context,
    "/pin": pin,
    "/undo": undo,
    "/file": file,
    "/auto": auto,
    "/save": save,
    "/load": load,
    "/export": export,
    "/retry": retry,
    "/clear": clear,
    "/help": show_help,
    "/quit": leave,
}


def run_command(chat: Chat, line: str) -> None:
    """Run a line that begins with a slash. Raises InputError for a command that does not exist."""
    from agentcompact.errors import InputError
    from agentcompact.settings import suggestion

    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        raise InputError(f"there is no command {name}{suggestion(name, COMMANDS)} (see /help)")
    COMMANDS[name](chat, rest.strip())


def _number(text: str, example: str, kind: Callable[[str], Number]) -> Number:
    try:
        return kind(text)
    except ValueError as error:
        raise click.UsageError(f"a number is needed, for example {example}") from error
