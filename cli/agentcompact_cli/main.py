"""The command itself: its subcommands, loaded when called, and how errors end it."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from agentcompact.errors import AgentCompactError

# Subcommand -> what `agentcompact --help` says of it; each lives in the module of its name, - being _.
COMMANDS = {
    "chat": "Talk with a model; the conversation compacts itself.",
    "sessions": "List, show, export and delete what chats left.",
    "compact": "Compact a document into a cache file.",
    "ask": "Answer questions from a cache file.",
    "inspect": "Show what a cache file holds.",
    "eval": "Measure strategies on the same documents.",
    "report": "Show what was measured: tables, plots, a page.",
    "strategies": "List the strategies, their settings and defaults.",
    "build-corpus": "Gather texts to train a writer on.",
    "train-writer": "Train a writer for the strategy fast_diamond.",
    "models": "List the models at hand, and how to name others.",
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is called, so that help and completion are instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"agentcompact_cli.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from agentcompact.settings import suggestion

            ctx.fail(f"no such command '{args[0]}'{suggestion(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentcompact")
def cli() -> None:
    """Compact the KV cache of a conversation or a document, and go on from it.

    \b
    Example:
      agentcompact chat
      agentcompact compact book.txt -o book.kv --ratio 8
      agentcompact ask book.kv "Who ordered the audit?"
    """


def main() -> NoReturn:
    """Run the command. Exit code 0, 1 (failed), 2 (bad usage or input), 130 (interrupted)."""
    # Threads that wait by spinning make a busy machine several times slower, and gain nothing on a quiet one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for number in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, number):
            signal.signal(getattr(signal, number), _terminated)
    # A stream that was closed for us reads as empty and takes everything.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    sys.exit(_run())


def _run() -> int:
    try:
        code = cli(standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort:
        return _fail("interrupted; nothing was left half-written", 130)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AgentCompactError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left half-written", 130)
    except BrokenPipeError:
        _drop_output(None)
        return 1
    except OSError as error:
        _drop_output(error)
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2 if isinstance(error, PermissionError) else 1)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return _fail("out of memory: take a shorter document, a smaller model or --dtype bfloat16", 1)


def _drop_output(error: OSError | None) -> None:
    """Send what is still buffered nowhere, where standard output itself has failed: it would fail again at exit."""
    if error is None or error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    shown = "".join(c if c.isprintable() else "?" for c in message)  # names may hold what colours a terminal
    click.echo(f"agentcompact: {shown}", err=True)
    return code


def _out_of_memory(error: BaseException) -> bool:
    """Torch reports exhausted memory as a RuntimeError whose text alone tells."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _terminated(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
