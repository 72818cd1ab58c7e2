"""`agentcompact train-writer`: a writer for the strategy fast_diamond, trained for one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentcompact_cli.console import out, print_json, size, stepping, working
from agentcompact_cli.options import ModelChoice, model_options, output_options, parse_settings

if TYPE_CHECKING:
    from agentcompact.training import TrainingSettings, TrainingStep

SHOWN_EVERY = 10


@click.command(name="train-writer")
@click.option(
    "--corpus",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of UTF-8 texts, or a JSONL file with a text a line (see build-corpus).",
)
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to fill.")
@click.option("--context", type=int, help="Entries that the writer reads at a time. [default: 1024]")
@click.option("--latents", type=int, help="Entries that it makes of them. [default: 128]")
@click.option("--updates", type=int, help="Updates of the loss on continuations. [default: 3000]")
@click.option("--attention-updates", type=int, help="Cheap updates on attention outputs before. [default: 0]")
@click.option("--applications", type=int, help="Apply the writer so often before the loss. [default: 1]")
@click.option(
    "--start-from", type=click.Path(path_type=Path), help="A trained writer to begin with: a file, or a run's folder."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of every random choice. [default: 0]")
@click.option(
    "--set", "pairs", multiple=True, metavar="NAME=VALUE", help="Another setting of the training or the writer."
)
@click.option("--teacher-gib", type=float, default=8.0, show_default=True, help="Most GiB of teacher caches on disk.")
@click.option(
    "--teacher-dir", type=click.Path(path_type=Path, file_okay=False), help="Their folder. [default: OUTPUT/teacher]"
)
@model_options
@output_options
def command(
    corpus: Path,
    output: Path,
    pairs: tuple[str, ...],
    teacher_gib: float,
    teacher_dir: Path | None,
    start_from: Path | None,
    choice: ModelChoice,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a writer for a model; the same command goes on with a run that was interrupted.

    OUTPUT gets the writer, a checkpoint, a log and a plot of the losses. Whole documents of the corpus are held out.

    \b
    Example:
      agentcompact train-writer --model ./my-model --corpus texts/ --context 1024 --latents 128 -o writer/
      agentcompact compact book.txt --model ./my-model --strategy fast_diamond --writer writer/ -o book.kv
    """
    settings = _settings({**parse_settings(pairs), **{name: v for name, v in options.items() if v is not None}})
    from agentcompact.training import Trainer, TrainingStopped, cut_corpus, read_texts

    texts = read_texts(corpus)
    with working(quiet) as work:
        work.say("starting")
        from agentcompact.engines import TransformersEngine

        engine = TransformersEngine(choice.load("smollm2", work.say))
        work.say("reading the corpus")
        windows = cut_corpus(texts, engine.encode, settings)
    with stepping(quiet) as show:

        def tell(step: TrainingStep) -> None:
            if step.update in (1, step.total) or step.update % SHOWN_EVERY == 0:
                show(step.update, step.total, step.line, step.seconds_left)

        trainer = Trainer(
            engine,
            windows,
            settings,
            output,
            teacher_folder=teacher_dir,
            teacher_bytes=int(teacher_gib * 2**30),
            start_from=start_from,
            report=tell,
        )
        try:
            path = trainer.run()
        except TrainingStopped as stopped:
            click.echo(f"agentcompact: {stopped}", err=True)
            raise click.exceptions.Exit(130) from stopped
    held = trainer.held_out
    written = path.stat().st_size
    facts = {"writer": str(path), "bytes": written, "updates": trainer.update, "held_out": held}
    if as_json:
        print_json(facts)
    else:
        said = "" if held is None else f", held-out KL / no-context KL {held:.3f}"
        out.print(f"[bold]{path}[/]  {size(written)}{said}", soft_wrap=True)
        click.echo(f"  use it: agentcompact compact ... --strategy fast_diamond --writer {output}")


def _settings(values: dict[str, Any]) -> TrainingSettings:
    """Make settings of training and writer from values by name. Raises SettingsError."""
    from agentcompact.settings import build_settings
    from agentcompact.training import TrainingSettings
    from agentcompact.writers import WriterSettings

    of_writer = {name: values.pop(name) for name in list(values) if name in WriterSettings.model_fields}
    writer = build_settings(WriterSettings, of_writer, "the writer")
    return build_settings(TrainingSettings, {**values, "writer": writer}, "the training")
