"""`agentcompact chat`: a conversation that compacts itself."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentcompact_cli.console import working
from agentcompact_cli.options import ModelChoice, model_options, output_options, parse_settings

if TYPE_CHECKING:
    from agentcompact.session import Session, SessionPolicy
    from agentcompact_cli.chat_loop import Chat


@click.command(name="chat")
@click.option("--strategy", "-s", help="How to compact; see `agentcompact strategies`. [default: attention_matching]")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting of the strategy; repeatable.")
@click.option("--ratio", "-r", type=float, help="Keep one entry for so many tokens. [default: 4]")
@click.option("--window", "-w", type=int, help="Held positions at most. [default: the model's context]")
@click.option("--trigger", help="When to compact: 80%, 6000 (positions) or messages:40. [default: 80%]")
@click.option("--keep", help="What stays as it is at the end: messages:6, 1000 or 20%. [default: messages:6]")
@click.option("--min-fidelity", type=float, help="Refuse a compaction below this top-1 agreement (0 to 1).")
@click.option("--no-auto", is_flag=True, help="Compact only on /compact.")
@click.option("--system", help="The system message of a new session.")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with a [session] table of such settings.")
@click.option("--session", "name", help="Open this session, or begin it. [default: a new one]")
@click.option("--resume", "-c", is_flag=True, help="Go on with the session that changed last.")
@click.option("--no-save", is_flag=True, help="Keep nothing on disk.")
@click.option("--once", metavar="TEXT", help="Send one message, print the reply, and leave.")
@click.option("--max-new-tokens", "-n", type=int, default=256, show_default=True, help="Most tokens of a reply.")
@click.option("--temperature", "-t", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus sampling.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampler.")
@model_options
@output_options
def command(
    name: str | None,
    resume: bool,
    no_save: bool,
    once: str | None,
    system: str | None,
    choice: ModelChoice,
    quiet: bool,
    as_json: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    **policy_options: Any,
) -> None:
    """Talk with a model; the conversation is compacted by itself before it reaches the window, and kept.

    Piped input is one message a line. /help lists the commands.

    \b
    Example:
      agentcompact chat --strategy two_pass
      agentcompact chat --session harbour --window 2000 --trigger 80% --keep messages:4
      agentcompact chat --resume
      agentcompact chat --once "What is a lighthouse?" --json
    """
    from agentcompact.errors import InputError
    from agentcompact.settings import SamplingSettings, build_settings

    if sum((name is not None, resume, no_save)) > 1:
        raise InputError("--session, --resume and --no-save exclude each other: give one of them")
    policy = _policy(**policy_options)
    values = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = build_settings(SamplingSettings, values, "sampling")
    name = _session_name(name, resume, no_save)
    made_with = _model_of(name)
    with working(quiet) as work:
        work.say("starting")
        loaded = choice.load(made_with or "smollm2", work.say)

    from agentcompact import TransformersEngine
    from agentcompact_cli.chat_loop import Chat

    engine = TransformersEngine(loaded)

    def open_session(wanted: str, must_exist: bool) -> Session:
        return _opened(engine, wanted, must_exist, no_save, policy, sampling, system)

    chat = Chat(open_session, name, quiet=quiet, as_json=as_json)
    try:
        code = _run(chat, once, "not kept" if no_save else f"session {name}")
    finally:
        chat.session.close()
    if code:
        raise click.exceptions.Exit(code)


def _run(chat: Chat, once: str | None, kept: str) -> int:
    """Take lines from where they come; return the exit code."""
    from agentcompact_cli.chat_loop import piped_lines, typed_lines

    for line in chat.session.template.fallbacks:
        click.echo(f"agentcompact: note: {line}", err=True)
    if once is not None:
        return chat.run(iter([once]))
    if not sys.stdin.isatty():
        return chat.run(piped_lines(chat))
    count = len(chat.session.messages)
    said = f", {count} messages so far" if count else ""
    model = chat.session.engine.describe().model_source
    click.echo(f"{model} · {kept}{said} · /help for commands, Ctrl-D leaves")
    return chat.run(typed_lines(chat, _history_file()))


def _policy(
    strategy: str | None,
    pairs: tuple[str, ...],
    ratio: float | None,
    window: int | None,
    trigger: str | None,
    keep: str | None,
    min_fidelity: float | None,
    no_auto: bool,
    config: Path | None,
) -> SessionPolicy:
    """Return the policy that options, environment and a settings file make, in this order."""
    import platformdirs

    from agentcompact.session import read_policy

    given: dict[str, Any] = {
        "strategy": strategy,
        "settings": parse_settings(pairs) or None,
        "ratio": ratio,
        "window": window,
        "trigger": trigger,
        "keep": keep,
        "min_fidelity": min_fidelity,
        "auto": False if no_auto else None,
    }
    default = platformdirs.user_config_path("agentcompact") / "config.toml"
    file = config or (default if default.is_file() else None)
    return read_policy(file, **{name: value for name, value in given.items() if value is not None})


def _session_name(name: str | None, resume: bool, no_save: bool) -> str:
    """Return the session to open: the one named, the last one, or a new one named by the time."""
    from agentcompact.errors import DocumentError
    from agentcompact.session.store import session_folder, session_names

    if resume:
        names = session_names()
        if not names:
            raise DocumentError("there is no session to resume: begin one with agentcompact chat")
        return names[0]
    if name is not None:
        session_folder(name)
        return name
    return "unsaved" if no_save else datetime.now().astimezone().strftime("%Y-%m-%d %H.%M.%S")


def _model_of(name: str) -> str:
    """Return the model that a session was made with, "" for a new one."""
    from agentcompact.session.journal import DATABASE
    from agentcompact.session.store import read_session, session_folder

    if not (session_folder(name) / DATABASE).is_file():
        return ""
    return str(read_session(name).created.get("model", ""))


def _opened(
    engine: Any, name: str, must_exist: bool, no_save: bool, policy: SessionPolicy, sampling: Any, system: str | None
) -> Session:
    from agentcompact.session import Session
    from agentcompact.session.store import check_exists, session_folder

    if must_exist:
        check_exists(name)
    folder = None if no_save and not must_exist else session_folder(name)
    return Session(engine, policy, folder=folder, system=system, sampling=sampling)


def _history_file() -> Path:
    from agentcompact.session.store import sessions_root

    return sessions_root() / ".history"
