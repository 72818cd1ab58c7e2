"""`agentcompact sessions`: list, show, export and delete what chats left."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentcompact_cli.console import out, print_json, size

if TYPE_CHECKING:
    from agentcompact.session.store import SessionInfo


@click.group(name="sessions", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the sessions of `agentcompact chat`; show, export or delete one.

    \b
    Example:
      agentcompact sessions
      agentcompact sessions show harbour
      agentcompact sessions export harbour -o harbour.md
      agentcompact sessions delete harbour
    """
    if context.invoked_subcommand is not None:
        return
    from agentcompact.errors import DocumentError
    from agentcompact.session.store import session_info, session_names

    found, broken = [], []
    for name in session_names():
        try:
            found.append(session_info(name))
        except DocumentError as error:
            broken.append(str(error))
    if as_json:
        print_json([asdict(info) for info in found])
    else:
        _print_list(found)
    for line in broken:
        click.echo(f"agentcompact: {line}", err=True)


@command.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print messages and compactions as JSON.")
def show(name: str, as_json: bool) -> None:
    """Print the transcript of a session, and its compactions."""
    from agentcompact.session.store import read_session
    from agentcompact_cli.chat_view import report_line

    state = read_session(name)
    if as_json:
        print_json(
            {
                "created": state.created,
                "messages": [message.model_dump(mode="json") for message in state.messages],
                "compactions": [report.model_dump(mode="json") for report in state.reports],
            }
        )
        return
    for number, message in enumerate(state.messages, start=1):
        pinned = ", pinned" if number - 1 in state.pinned else ""
        out.print(f"{number} {message.role}{pinned}", style="bold", markup=False)
        click.echo(message.content or ", ".join(call.name for call in message.tool_calls))
    for report in state.reports:
        click.echo(report_line(report))


@command.command()
@click.argument("name")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Markdown file to write. [default: print it]")
@click.option("--force", "-f", is_flag=True, help="Replace the file if it exists.")
def export(name: str, output: Path | None, force: bool) -> None:
    """Write the transcript of a session as Markdown."""
    from agentcompact.files import atomic_output
    from agentcompact.session.store import read_session, to_markdown

    text = to_markdown(read_session(name).messages, name)
    if output is None:
        click.echo(text)
        return
    with atomic_output(output, overwrite=force) as temporary:
        temporary.write_text(text, encoding="utf-8")
    click.echo(str(output))


@command.command()
@click.argument("names", nargs=-1, required=True)
def delete(names: tuple[str, ...]) -> None:
    """Delete sessions, transcript and all."""
    from agentcompact.session.store import check_exists, delete_session

    for name in names:
        check_exists(name)
    for name in names:
        delete_session(name)
        click.echo(f"deleted {name}")


def _print_list(found: list[SessionInfo]) -> None:
    from rich.table import Table

    if not found:
        click.echo("no sessions yet: begin one with agentcompact chat", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("name", "changed", "messages", "compactions", "size", "model"):
        table.add_column(name, justify="right" if name in ("messages", "compactions", "size") else "left")
    for info in found:
        opened = f" (open in process {info.holder})" if info.holder else ""
        table.add_row(
            f"{info.name}{opened}",
            info.changed,
            str(info.messages),
            str(info.compactions),
            size(info.nbytes),
            info.model,
        )
    out.print(table)
