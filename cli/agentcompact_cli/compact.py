"""`agentcompact compact`: a document becomes a cache file."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import click

from agentcompact_cli.console import out, print_json, size, warn, working
from agentcompact_cli.options import ModelChoice, model_options, output_options, parse_settings, read_document


@click.command(name="compact")
@click.argument("document", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Cache file to write. [default: DOCUMENT with .kv]",
)
@click.option("--ratio", "-r", type=float, help="Keep one entry in this many. [default: 8]")
@click.option("--budget", "-b", type=int, help="Entries to keep per layer and KV head, instead of a ratio.")
@click.option("--strategy", "-s", default="two_pass", show_default=True, help="See `agentcompact strategies`.")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting of the strategy; repeatable.")
@click.option(
    "--prompt",
    type=click.Choice(["auto", "chat", "raw"]),
    default="auto",
    show_default=True,
    help="Put the document into the model's chat template, or leave it plain.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of every random choice.")
@click.option("--force", "-f", is_flag=True, help="Replace the output file if it exists.")
@model_options
@output_options
def command(
    document: Path,
    output: Path | None,
    ratio: float | None,
    budget: int | None,
    strategy: str,
    pairs: tuple[str, ...],
    prompt: Any,
    seed: int,
    force: bool,
    choice: ModelChoice,
    quiet: bool,
    as_json: bool,
) -> None:
    """Prefill DOCUMENT (a UTF-8 text file, or - for standard input), compact its cache, and save it.

    \b
    Example:
      agentcompact compact book.txt -o book.kv --ratio 8 --strategy two_pass
      agentcompact compact book.txt --budget 256 --set shortlist=3 --model ./my-model
    """
    from agentcompact.errors import BudgetError, InputError
    from agentcompact.files import check_output
    from agentcompact.settings import resolve_budget

    # Everything that can be wrong without a model is checked before one is loaded.
    if ratio is not None and budget is not None:
        raise BudgetError("--ratio and --budget exclude each other: give one of them")
    if ratio is None and budget is None:
        ratio = 8.0
    resolve_budget(1, ratio=ratio, budget=budget)
    text = read_document(document)
    if output is None:
        if str(document) == "-":
            raise InputError("a document from standard input needs --output")
        output = document.with_suffix(".kv")
    if output.exists() and document.exists() and output.samefile(document):
        raise InputError(f"{output} is the document itself: name another --output")
    check_output(output, overwrite=force)
    settings = parse_settings(pairs)

    with working(quiet) as work:
        work.say("starting")
        from agentcompact import compact, make_strategy

        method = make_strategy(strategy, **settings)
        loaded = choice.load("smollm2", work.say)
        cache = compact(
            loaded,
            text,
            method,
            ratio=ratio,
            budget=budget,
            prompt=prompt,
            seed=seed,
            document=document.name,
            progress=work,
        )
        work.say(f"writing {output}")
        cache.save(output, overwrite=force)
    report = cache.metadata.reports[-1]
    for warning in report.warnings:
        warn(warning)
    facts = {
        "output": str(output),
        "output_bytes": output.stat().st_size,
        "model": cache.metadata.model_source,
        "prefill_seconds": cache.metadata.prefill_seconds,
        "ratio": report.ratio,
        **report.model_dump(mode="json"),
    }
    if as_json:
        print_json(facts)
    else:
        _print_summary(facts)


def _print_summary(facts: dict[str, Any]) -> None:
    from rich.markup import escape

    seconds, prefill = facts["seconds"]["total"], facts["prefill_seconds"] or 0
    share = f", {seconds / prefill:.2f} of the prefill" if prefill else ""
    out.print(f"[bold]{escape(facts['output'])}[/]  {size(facts['output_bytes'])}", soft_wrap=True)
    out.print(
        f"  {facts['tokens']:,} tokens, {facts['entries_before']:,} entries -> {facts['entries_after']:,} "
        f"({facts['ratio']:.1f}x), {size(facts['bytes_before'])} -> {size(facts['bytes_after'])}"
    )
    out.print(f"  prefill {prefill:.1f} s, {facts['strategy']} {seconds:.1f} s{share}")
    click.echo(f'  ask it: agentcompact ask {quote(facts["output"])} "..."')
