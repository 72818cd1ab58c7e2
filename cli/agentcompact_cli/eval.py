"""`agentcompact eval`: measure strategies on the same documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentcompact_cli.console import out, print_json, size, stepping, working
from agentcompact_cli.options import ModelChoice, model_options, output_options

if TYPE_CHECKING:
    from agentcompact.evaluation import CellResult, Document, Task


BATCH = 32
"""Questions answered together: most documents have fewer, and one batch reads the weights once for all of them."""


@dataclass(frozen=True)
class _Asked:
    """What the options say."""

    tasks: list[str]
    data: tuple[Path, ...]
    lengths: list[int]
    documents: int
    questions: int | None
    strategies: list[str]
    ratios: list[float]
    compactions: list[int]
    metrics: list[str]
    seed: int
    output: Path
    retry_failed: bool


def _words(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Split comma-separated values of an option that may be repeated."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def _numbers(kind: Callable[[str], Any]) -> Callable[..., list[Any]]:
    def read(context: click.Context, parameter: click.Parameter, value: str) -> list[Any]:
        try:
            numbers = [kind(word) for word in _words(context, parameter, (value,))]
        except ValueError as error:
            raise click.BadParameter(f"'{value}' is no list of numbers; write 4,8,16") from error
        if not numbers or min(numbers) < 1:
            raise click.BadParameter(f"'{value}': numbers of at least 1 are needed")
        return list(dict.fromkeys(numbers))

    return read


@click.command(name="eval")
@click.option("--task", "-t", "tasks", multiple=True, callback=_words, help="Tasks, comma-separated; see --list-tasks.")
@click.option(
    "--data",
    "-d",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file of your own documents and questions, one JSON object a line; repeatable.",
)
@click.option(
    "--lengths",
    default="1000",
    show_default=True,
    callback=_numbers(int),
    help="Tokens of the tasks' documents, comma-separated.",
)
@click.option(
    "--documents",
    "-n",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Documents of each task and length.",
)
@click.option(
    "--questions",
    type=click.IntRange(min=1),
    help="At most this many questions of each document. [default: the task's]",
)
@click.option(
    "--strategies",
    "-s",
    multiple=True,
    default=["all"],
    show_default=True,
    callback=_words,
    help="Strategies, comma-separated, with settings as NAME:SETTING=VALUE:...; or all (but those that train).",
)
@click.option("--ratios", "-r", default="4,8,16", show_default=True, callback=_numbers(float), help="Comma-separated.")
@click.option(
    "--compactions",
    default="1",
    show_default=True,
    callback=_numbers(int),
    help="How often to compact in a row while new text arrives, comma-separated.",
)
@click.option(
    "--metrics",
    default=["answers,fidelity,attention,speed"],
    show_default=True,
    multiple=True,
    callback=_words,
    help="What to measure; answers always are.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of documents and strategies.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default="results",
    show_default=True,
    help="Results folder; what it has already is not measured again.",
)
@click.option("--retry-failed", is_flag=True, help="Measure again what failed before.")
@click.option("--list-tasks", is_flag=True, help="List the tasks and stop.")
@model_options
@output_options
def command(list_tasks: bool, choice: ModelChoice, quiet: bool, as_json: bool, **wanted: Any) -> None:
    """Measure strategies at several ratios on the same documents, beside the full cache and no context at all.

    Results are appended to RESULTS/results.jsonl one by one: an evaluation that was stopped goes on where it was, and
    more strategies, ratios, tasks or models can be added later. `agentcompact report` shows them.

    \b
    Example:
      agentcompact eval --task needles --strategies all --ratios 4,8,16 -o results/
      agentcompact eval --task phonebook --lengths 1000,2000 --model ./my-model \\
          --strategies attention_matching,two_pass:shortlist=3,kvzip
      agentcompact eval --data my.jsonl
      agentcompact eval --task needles --compactions 1,5,20 --ratios 8
    """
    from agentcompact.errors import EvaluationError, InputError

    if list_tasks:
        _print_tasks(as_json)
        return
    asked = _Asked(**wanted)
    if not asked.tasks and not asked.data:
        raise InputError("name a --task (see --list-tasks) or a file of your own with --data")
    cells = _run(asked, choice, quiet)
    if as_json:
        print_json([cell.model_dump(mode="json", exclude_defaults=True) for cell in cells])
    elif not quiet:
        _print_summary(cells, asked.output)
    failed = [cell for cell in cells if cell.status == "failed"]
    if failed:
        raise EvaluationError(
            f"{len(failed)} of {len(cells)} cells failed, the first with: {failed[0].error} "
            f"({failed[0].document}, {failed[0].strategy}); --retry-failed measures them again"
        )


def _run(asked: _Asked, choice: ModelChoice, quiet: bool) -> list[CellResult]:
    """Check everything that can be checked without a model, load it, make the documents, and measure."""
    with working(quiet) as work:
        work.say("starting")
        from agentcompact.evaluation import EvaluationPlan, choose_strategies, evaluate, read_documents, resolve_tasks
        from agentcompact.evaluation.store import check_folder

        strategies = choose_strategies(asked.strategies)
        plan = EvaluationPlan(
            strategies,
            asked.ratios,
            frozenset(asked.metrics),
            asked.seed,
            asked.retry_failed,
            asked.compactions,
        )
        tasks = resolve_tasks(asked.tasks)
        documents = [document for path in asked.data for document in read_documents(path)]
        check_folder(asked.output)

        from agentcompact.engines import TransformersEngine
        from agentcompact.errors import ContextLengthError
        from agentcompact.settings import EngineSettings

        engine = TransformersEngine(choice.load("smollm2", work.say), EngineSettings(batch_size=BATCH))
        too_long = [length for length in asked.lengths if tasks and length > engine.geometry.max_positions]
        if too_long:
            raise ContextLengthError(
                f"documents of {too_long[0]:,} tokens do not fit the model's context of "
                f"{engine.geometry.max_positions:,}: give shorter --lengths"
            )
        documents += _generated(tasks, asked, lambda text: len(engine.encode(text)), work.say)
        each = len(plan.cells())
        work.say(f"{len(documents) * each:,} cells: {each:,} of each of {len(documents):,} documents")
    with stepping(quiet) as show:
        return evaluate(
            engine,
            documents,
            plan,
            asked.output,
            lambda step: show(step.done, step.total, _describe(step.cell), step.seconds_left),
            show.within,
        )


def _generated(
    tasks: list[Task], asked: _Asked, count_tokens: Callable[[str], int], say: Callable[[str], None]
) -> list[Document]:
    from agentcompact.evaluation import generate_documents

    made: list[Document] = []
    for task in tasks:
        for length in asked.lengths:
            say(f"making {task.name} documents of {length:,} tokens")
            made += generate_documents(
                task,
                count=asked.documents,
                length=length,
                seed=asked.seed,
                count_tokens=count_tokens,
                questions=asked.questions,
            )
    return made


def _describe(cell: CellResult) -> str:
    """Write a cell in one line: what it was and how many answers were right."""
    from agentcompact.evaluation.report.columns import plain

    where = f"{cell.document} {cell.strategy}" + (f" {cell.ratio:g}x" if cell.ratio else "")
    where += f", compacted {cell.compactions} times" if cell.compactions > 1 else ""
    if cell.status == "failed":
        return plain(f"{where}: failed: {cell.error}")
    scores = [question.score for question in cell.questions if question.score is not None]
    choices = [question.choice_score for question in cell.questions if question.choice_score is not None]
    parts = [f"{sum(scores):g} of {len(scores)} right"] if scores else []
    parts += [f"{sum(choices):g} of {len(choices)} chosen right"] if choices else []
    parts += [f"{cell.compaction_seconds:.1f} s"] if cell.compaction_seconds is not None else []
    return plain(f"{where}: {', '.join(parts)}")


def _print_tasks(as_json: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from agentcompact.evaluation.tasks import GROUPS, TASKS

    if as_json:
        print_json([{"name": name, "summary": task.summary} for name, task in TASKS.items()])
        return
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, task in TASKS.items():
        table.add_row(name, escape(task.summary))
    for name, members in GROUPS.items():
        table.add_row(name, f"all of {', '.join(members)}")
    out.print(table)


def _print_summary(cells: list[CellResult], output: Path) -> None:
    from agentcompact.evaluation.report import terminal_tables
    from agentcompact.evaluation.summary import summarise

    for table in terminal_tables(summarise(cells), out.width):
        out.print(table)
    path = output / "results.jsonl"
    click.echo(f"{path}  {size(path.stat().st_size)}")
    click.echo(f"  report it: agentcompact report {output}")
