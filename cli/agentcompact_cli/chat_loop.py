"""The loop of a chat: a line comes in, a command runs or a reply streams out, Ctrl-C stops what runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentcompact_cli.chat_commands import COMMANDS, Quit, run_command
from agentcompact_cli.chat_view import report_line, status_line, warning_line
from agentcompact_cli.console import print_json, working

if TYPE_CHECKING:
    from agentcompact.engines import Progress
    from agentcompact.session import Reply, Session

Result = TypeVar("Result")
PROMPT = "> "
LONG = 512
"""Tokens from which on reading them is worth a progress bar."""


class Chat:
    """A chat in a terminal, or over a pipe."""

    def __init__(
        self, open_session: Callable[[str, bool], Session], name: str, *, quiet: bool = False, as_json: bool = False
    ) -> None:
        """open_session: opens a session by name, one that must exist or not."""
        self._open = open_session
        self.quiet = quiet
        self.as_json = as_json
        self.name = name
        self.session = open_session(name, False)
        self.attached: list[str] = []
        """Documents that go along with the next message."""
        self._warned = False
        self.failed = False
        """Whether some line could not be carried out."""

    def open(self, name: str, *, must_exist: bool) -> None:
        """Go on with another session; this one stays open where that cannot be opened."""
        other = self._open(name, must_exist)
        try:
            self.session.close()
        finally:  # closed it is, also where its last state could not be saved
            self.session, self.name = other, name

    def say(self, text: str) -> None:
        """Tell the person something that is no reply."""
        click.echo(text, err=self.as_json)

    def run(self, lines: Iterator[str]) -> int:
        """Take lines until they end or /quit; return the exit code: 1 where a line failed and nobody was there."""
        for line in lines:
            if not line.strip():
                continue
            try:
                self.failed |= not self.take(line)
            except Quit:
                break
        return int(self.failed and not sys.stdin.isatty())

    def take(self, line: str) -> bool:
        """Run a command or send a message; return whether that went well."""
        from agentcompact.errors import AgentCompactError

        try:
            if line.startswith("/") and not line.startswith("//"):
                run_command(self, line.strip())
            else:
                self.send(line.removeprefix("/") if line.startswith("//") else line)
        except (AgentCompactError, click.ClickException) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else str(error)
            click.echo(f"agentcompact: {message}", err=True)
            return False
        except KeyboardInterrupt:
            self.say("(stopped; nothing has changed)")
        return True

    def send(self, text: str) -> None:
        """Send a message with what is attached, and print the reply; a message that fails is taken back."""
        before = len(self.session.messages)
        self.session.add("\n\n".join([*self.attached, text]))
        try:
            self.reply()
        except BaseException:
            if len(self.session.messages) > before:
                self.session.delete_from(before + 1)
            raise
        self.attached.clear()

    def reply(self, *, again: bool = False) -> None:
        """Print the model's reply as it comes, and what happened to the memory before it."""
        begun = False

        def on_text(piece: str) -> None:
            nonlocal begun
            if not begun:
                shown.close()
                begun = True
            if not self.as_json:
                click.echo(piece, nl=False)

        with ExitStack() as shown:
            ask = self.session.regenerate if again else self.session.reply
            made = ask(on_text, _lazily(shown, self.quiet))
        if self.as_json:
            print_json(reply_facts(made, self.session))
            return
        click.echo(" (stopped)" if made.finish_reason == "interrupted" else "")
        for report in made.compactions:
            self.say(f"({report_line(report)})")
        for note in made.notes:
            self.say(f"({note})")
        warning = warning_line(self.session.status())
        if warning and not self._warned:
            self.say(f"({warning})")
        self._warned = warning is not None

    def working(self, work: Callable[[Progress | None], Result]) -> Result:
        """Do long work with its progress shown."""
        with working(self.quiet) as shown:
            return work(shown)


def reply_facts(made: Reply, session: Session) -> dict[str, Any]:
    """Return a reply and what it cost, for programs."""
    status = session.status()
    return {
        "reply": made.text,
        "finish_reason": made.finish_reason,
        "prefilled": made.prefilled,
        "decoded": made.decoded,
        "seconds": made.seconds,
        "held": status.held,
        "logical": status.logical,
        "window": status.window,
        "compactions": [report.model_dump(mode="json") for report in made.compactions],
        "notes": made.notes,
    }


def _lazily(stack: ExitStack, quiet: bool) -> Progress:
    """Return a progress callback whose display appears with the first long phase."""
    shown: list[Any] = []

    def tell(phase: str, done: int, total: int) -> None:
        if not shown and (total >= LONG or phase != "prefill"):
            shown.append(stack.enter_context(working(quiet)))
        if shown:
            shown[0](phase, done, total)

    return tell


def piped_lines(chat: Chat) -> Iterator[str]:
    """Give the lines of standard input; each is a message. One that is no text is left out, and said."""
    from agentcompact.errors import DocumentError
    from agentcompact_cli.options import decode_text

    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = decode_text(line, f"line {number}")
        except DocumentError as error:
            click.echo(f"agentcompact: {error}", err=True)
            chat.failed = True
            continue
        yield text.rstrip("\r\n")


def typed_lines(chat: Chat, history: Path) -> Iterator[str]:
    """Ask for lines in a terminal, with history, completion of commands and the status below."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        kept: FileHistory | InMemoryHistory = FileHistory(str(history))
    except OSError:
        kept = InMemoryHistory()
    asked: PromptSession[str] = PromptSession(
        history=kept,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    while True:
        # Nothing changes while a line is typed, and the status below is drawn with every key.
        status = status_line(chat.session.status(), chat.session.policy)
        try:
            yield asked.prompt(PROMPT, bottom_toolbar=status)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
