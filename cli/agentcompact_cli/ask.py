"""`agentcompact ask`: questions answered from a cache file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentcompact_cli.console import out, print_json, working
from agentcompact_cli.options import ModelChoice, decode_text, model_options, output_options

if TYPE_CHECKING:
    from agentcompact import CompactedCache, Generation, LoadedModel, SamplingSettings, TransformersEngine


@click.command(name="ask")
@click.argument("cache_file", type=click.Path(path_type=Path))
@click.argument("questions", nargs=-1)
@click.option("--max-new-tokens", "-n", type=int, default=64, show_default=True, help="Most tokens of one answer.")
@click.option("--temperature", "-t", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus sampling.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@click.option("--stop", multiple=True, help="End an answer before this string; repeatable.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Questions answered together.",
)
@model_options
@output_options
def command(
    cache_file: Path,
    questions: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    stop: tuple[str, ...],
    batch_size: int,
    choice: ModelChoice,
    quiet: bool,
    as_json: bool,
) -> None:
    """Answer QUESTIONS from CACHE_FILE, all together. Without any, ask for them one by one (or read lines from a pipe).

    \b
    Example:
      agentcompact ask book.kv "Who ordered the audit?" "In which year?"
      agentcompact ask book.kv < questions.txt
    """
    from agentcompact.errors import DocumentError
    from agentcompact.settings import EngineSettings, SamplingSettings, build_settings

    values = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }
    sampling = build_settings(SamplingSettings, values, "sampling")
    interactive = not questions and sys.stdin.isatty()
    if not questions and not interactive:
        lines = decode_text(sys.stdin.buffer.read(), "standard input").splitlines()
        questions = tuple(line.strip() for line in lines if line.strip())
        if not questions:
            raise DocumentError("no question was given: name them, or write one a line to standard input")
    if any(not question.strip() for question in questions):
        raise DocumentError("a question is empty")

    begun = time.perf_counter()
    with working(quiet) as work:
        work.say("starting")
        from agentcompact import TransformersEngine, answer

        loaded, cache = _open(cache_file, choice, work.say)
        engine = TransformersEngine(loaded, EngineSettings(batch_size=batch_size))
        if not interactive:
            ready = time.perf_counter()
            generations = answer(engine, cache, questions, sampling=sampling, progress=work)
    if interactive:
        _ask_one_by_one(engine, cache, sampling, as_json)
        return
    seconds = {"load": ready - begun, "answer": time.perf_counter() - ready}
    _print_answers(cache_file, questions, generations, seconds, as_json)


def _print_answers(
    cache_file: Path, questions: Sequence[str], answers: Sequence[Generation], seconds: dict[str, float], as_json: bool
) -> None:
    """Print answers with their questions; a single one alone, so that it can be used as it is."""
    if as_json:
        results = [
            {
                "question": question,
                "answer": made.text.strip(),
                "tokens": len(made.token_ids),
                "finish_reason": made.finish_reason,
            }
            for question, made in zip(questions, answers, strict=True)
        ]
        print_json({"cache": str(cache_file), "answers": results, "seconds": seconds})
        return
    for question, made in zip(questions, answers, strict=True):
        if len(questions) > 1:
            out.print(f"[bold]{_escaped(question)}[/]", soft_wrap=True)
        click.echo(made.text.strip())


def _open(cache_file: Path, choice: ModelChoice, say: Callable[[str], None]) -> tuple[LoadedModel, CompactedCache]:
    """Load the model that the file names (or the one asked for), and the cache."""
    from agentcompact import CompactedCache
    from agentcompact.cache.file import read_verified

    say(f"checking {cache_file}")
    made_by = read_verified(cache_file)[0].metadata
    loaded = choice.load(made_by.model_source, say, made_by.model_dtype)
    say(f"reading {cache_file}")
    return loaded, CompactedCache.load(cache_file, loaded)


def _ask_one_by_one(
    engine: TransformersEngine, cache: CompactedCache, sampling: SamplingSettings, as_json: bool
) -> None:
    """Prompt for questions until an empty line, the end of input, or Ctrl-C; answers appear as they are decoded."""
    from agentcompact import answer
    from agentcompact.errors import InputError

    report = cache.metadata.reports[-1] if cache.metadata.reports else None
    about = cache.metadata.document or "the document"
    compacted = f", {report.strategy} {report.ratio:.1f}x" if report else ""
    click.echo(f"Questions about {about} ({cache.next_position:,} tokens{compacted}); an empty line ends.", err=True)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return
        if not question:
            return
        stops = (*sampling.stop, *cache.metadata.prompt.stop)
        printer = _Printer(engine, stops, silent=as_json)
        try:
            made = answer(engine, cache, question, sampling=sampling, on_token=printer)[0]
        except InputError as error:
            click.echo(f"agentcompact: {error}", err=True)
            continue
        except KeyboardInterrupt:
            click.echo(" (stopped)")
            continue
        if as_json:
            print_json({"question": question, "answer": made.text.strip(), "finish_reason": made.finish_reason})
        else:
            printer.finish(made.text)


class _Printer:
    """Writes an answer as its tokens arrive."""

    def __init__(self, engine: TransformersEngine, stops: Sequence[str], silent: bool) -> None:
        from agentcompact.engines.text_stream import TextStream

        self._stream = TextStream(engine.decode_text, stops)
        self._silent = silent

    def __call__(self, _: int, token: int) -> None:
        piece = self._stream.add(token)
        if not self._silent:
            click.echo(piece, nl=False)

    def finish(self, text: str) -> None:
        click.echo(self._stream.finish(text))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
