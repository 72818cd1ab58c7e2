"""`agentcompact compact`: a document becomes a cache file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from agentcompact_cli.console import out, print_json, size, warn, working
from agentcompact_cli.options import ModelChoice, model_options, output_options, parse_settings, read_document

if TYPE_CHECKING:
    from agentcompact import CompactedCache
    from agentcompact.strategies import Strategy


@click.command(name="compact")
@click.argument("documents", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DOCUMENT...")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Cache file to write. [default: DOCUMENT with .kv]",
)
@click.option(
    "--output-dir",
    "-O",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the cache files of several documents; those that are there already are left out.",
)
@click.option("--ratio", "-r", type=float, help="Keep one entry in this many. [default: 8]")
@click.option("--budget", "-b", type=int, help="Entries to keep per layer and KV head, instead of a ratio.")
@click.option(
    "--strategy", "-s", default="attention_matching", show_default=True, help="See `agentcompact strategies`."
)
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting of the strategy; repeatable.")
@click.option("--writer", type=click.Path(path_type=Path), help="Trained writer, for the strategy fast_diamond.")
@click.option(
    "--block",
    type=click.IntRange(min=1),
    help="Tokens to prefill and compact at a time, so that memory stays bounded. [default: all at once]",
)
@click.option("--rolling", is_flag=True, help="Compact each block with what was kept before it, into one budget.")
@click.option(
    "--prompt",
    type=click.Choice(["auto", "chat", "raw"]),
    default="auto",
    show_default=True,
    help="Put the document into the model's chat template, or leave it plain.",
)
@click.option("--focus", metavar="TEXT", help="What to keep first, for the strategies that take a focus.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of every random choice.")
@click.option("--force", "-f", is_flag=True, help="Replace the output file if it exists.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint that an interrupted compaction left.")
@model_options
@output_options
def command(
    documents: tuple[Path, ...],
    output: Path | None,
    output_dir: Path | None,
    ratio: float | None,
    budget: int | None,
    strategy: str,
    pairs: tuple[str, ...],
    writer: Path | None,
    force: bool,
    resume: bool,
    choice: ModelChoice,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Prefill each DOCUMENT (a UTF-8 text file, or - for standard input), compact its cache, and save it.

    \b
    Example:
      agentcompact compact book.txt -o book.kv --ratio 8
      agentcompact compact book.txt --budget 256 --strategy two_pass --set shortlist=3 --model ./my-model
      agentcompact compact docs/*.txt -O compacted/ --block 4096
      agentcompact compact report.txt --strategy summary --focus "dates and costs"
      agentcompact compact manual.txt -o manual.kv --ratio 16 --strategy ttt --resume
    """
    # Everything that can be wrong without a model is checked before one is loaded.
    ratio = _checked_ratio(ratio, budget)
    if options["rolling"] and options["block"] is None:
        raise click.UsageError("--rolling goes block by block: give the tokens of a block with --block")
    texts = [read_document(document) for document in documents]
    targets = _targets(documents, output, output_dir, force)
    settings = parse_settings(pairs) | ({} if writer is None else {"writer": str(writer)})
    written = []
    with working(quiet) as work:
        work.say("starting")
        from agentcompact import compact, make_strategy
        from agentcompact.engines import TransformersEngine

        method = make_strategy(strategy, **settings)
        checkpoints = _checkpoints(targets, method, options["block"], resume=resume, force=force)
        if any(target is not None for target in targets):
            engine = TransformersEngine(choice.load("smollm2", work.say))
        for document, text, target, checkpoint in zip(documents, texts, targets, checkpoints, strict=True):
            if target is None:
                work.say(f"{document}: there already")
                continue
            if len(documents) > 1:
                work.say(f"{document}")
            with _kept(checkpoint):
                cache = compact(
                    engine, text, method, ratio=ratio, budget=budget, document=document.name, progress=work,
                    checkpoint=checkpoint, resume=resume, **options,
                )  # fmt: skip
                work.say(f"writing {target}")
                cache.save(target, overwrite=force)
            written.append(_facts(cache, target))
            for warning in cache.metadata.reports[-1].warnings:
                warn(warning)
    if as_json:
        print_json(written[0] if len(documents) == 1 else written)
        return
    for facts in written:
        _print_summary(facts)


def _checked_ratio(ratio: float | None, budget: int | None) -> float | None:
    """Return the ratio to compact by, None with a budget. Raises BudgetError for both, or for what cannot be met."""
    from agentcompact.errors import BudgetError
    from agentcompact.settings import resolve_budget

    if ratio is not None and budget is not None:
        raise BudgetError("--ratio and --budget exclude each other: give one of them")
    if ratio is None and budget is None:
        ratio = 8.0
    resolve_budget(1, ratio=ratio, budget=budget)
    return ratio


def _targets(
    documents: tuple[Path, ...], output: Path | None, output_dir: Path | None, force: bool
) -> list[Path | None]:
    """Return the cache file of each document, None where it is there already in the output folder.

    Raises InputError where the files cannot be told apart, and what `check_output` raises.
    """
    from agentcompact.errors import InputError, WriteError
    from agentcompact.files import check_output

    if output_dir is None:
        if len(documents) > 1:
            raise InputError(f"{len(documents)} documents need a folder for their caches: name one with --output-dir")
        if output is None and str(documents[0]) == "-":
            raise InputError("a document from standard input needs --output")
        target = output or documents[0].with_suffix(".kv")
        if target.exists() and documents[0].exists() and target.samefile(documents[0]):
            raise InputError(f"{target} is the document itself: name another --output")
        check_output(target, overwrite=force)
        return [target]
    if output is not None:
        raise InputError("--output and --output-dir exclude each other: give one of them")
    targets = [output_dir / f"{document.stem}.kv" for document in documents]
    for target in targets:
        if targets.count(target) > 1:
            raise InputError(f"two documents would both become {target}: compact them into different folders")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"the folder {output_dir} cannot be made: {error.strerror or error}") from error
    wanted = [None if target.is_file() and not force else target for target in targets]
    for each in wanted:
        if each is not None:
            check_output(each, overwrite=force)
    return wanted


def _checkpoints(
    targets: list[Path | None], method: Strategy, block: int | None, *, resume: bool, force: bool
) -> list[Path | None]:
    """Return where each document's compaction keeps what it has reached, None where it keeps nothing.

    With --force an old checkpoint is removed, unless --resume asks for it. Raises SettingsError where nothing can be
    resumed, CacheFileError for an interrupted compaction that is not to be gone on with.
    """
    from agentcompact.errors import CacheFileError, SettingsError

    if not method.resumable or block is not None:
        if resume:
            what = "compaction in blocks" if method.resumable else f"strategy '{method.name}'"
            raise SettingsError(f"{what} keeps no checkpoints: leave out --resume")
        return [None] * len(targets)
    checkpoints = [None if target is None else target.with_name(f"{target.name}.checkpoint") for target in targets]
    for each in checkpoints:
        if each is not None and each.exists() and not resume:
            if not force:
                raise CacheFileError(
                    f"{each} holds an interrupted compaction: add --resume to go on, or --force to begin again"
                )
            each.unlink()
    return checkpoints


@contextmanager
def _kept(checkpoint: Path | None) -> Iterator[None]:
    """Remove a checkpoint when the cache is written; say what an interruption leaves."""
    try:
        yield
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
    except KeyboardInterrupt:
        if checkpoint is not None and checkpoint.exists():
            click.echo(f"agentcompact: {checkpoint} keeps what was reached: go on with --resume", err=True)
        raise


def _facts(cache: CompactedCache, output: Path) -> dict[str, Any]:
    report = cache.metadata.reports[-1]
    return {
        "output": str(output),
        "output_bytes": output.stat().st_size,
        "model": cache.metadata.model_source,
        "prefill_seconds": cache.metadata.prefill_seconds,
        "ratio": report.ratio,
        **report.model_dump(mode="json"),
    }


def _training_lines(facts: dict[str, Any]) -> list[str]:
    """Return what to say of a strategy that trained: each phase in seconds and prefills, first and last losses."""
    training = facts["training"]
    if not training:
        return []
    prefill = facts["prefill_seconds"]
    shares = {name: f" ({taken / prefill:.1f}x)" if prefill else "" for name, taken in facts["seconds"].items()}
    taken = ((name, seconds) for name, seconds in facts["seconds"].items() if name != "total")
    phases = ", ".join(f"{name} {seconds:.1f} s{shares[name]}" for name, seconds in taken)
    losses = [f"{stage}: loss {curve[0]:.4g} -> {curve[-1]:.4g}" for stage, curve in training["losses"].items()]
    return [phases, *losses]


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
    for line in _training_lines(facts):
        out.print(f"  {line}")
    click.echo(f'  ask it: agentcompact ask {quote(facts["output"])} "..."')
