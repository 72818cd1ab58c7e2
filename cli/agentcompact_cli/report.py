"""`agentcompact report`: tables, plots and a page from the results of an evaluation."""

from __future__ import annotations

from pathlib import Path

import click

from agentcompact.errors import InputError
from agentcompact_cli.console import out, print_json, warn, working
from agentcompact_cli.options import output_options


@click.command(name="report")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FOLDER...")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the files; the results' own where there is one FOLDER.",
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the Markdown to this file, its images to a folder of that name beside it.",
)
@click.option("--against", metavar="STRATEGY", help="Compare the others with this strategy, on the same questions.")
@click.option("--no-plots", is_flag=True, help="No figures; matplotlib is not needed then.")
@output_options
def command(
    folders: tuple[Path, ...],
    output: Path | None,
    markdown: Path | None,
    against: str | None,
    no_plots: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Show the results in each FOLDER, and write report.html, report.md, results.csv and plots.

    Several folders make one report; where they hold the same cell, the last one counts. FOLDER holds the
    results.jsonl of an evaluation.

    \b
    Example:
      agentcompact report runs/monday
      agentcompact report runs/monday runs/tuesday --output runs/both
      agentcompact report runs/monday --markdown docs/results.md --against kvzip
    """
    from agentcompact.evaluation.comparison import compare
    from agentcompact.evaluation.report import check_markdown, comparison_table, terminal_tables, write_report
    from agentcompact.evaluation.report.content import comparison_grid
    from agentcompact.evaluation.store import read_results
    from agentcompact.evaluation.summary import summarise

    if output is None and len(folders) > 1:
        raise InputError("say with --output where the report of several folders goes")
    if markdown is not None:
        check_markdown(markdown, output or folders[0])
    cells = []
    for folder in folders:
        found, cut_off = read_results(folder)
        if cut_off:
            warn(f"{folder}: the last line of the results is cut off and was left out")
        cells += found
    if not cells:
        raise InputError(f"there are no results in {', '.join(map(str, folders))}")
    rows = summarise(cells)
    comparisons = [] if against is None else compare(cells, against)
    if not as_json:
        out.print(*terminal_tables(rows, out.width), sep="\n")
        if against is not None:
            out.print(comparison_table(comparison_grid(comparisons, against)))
    with working(quiet) as work:
        work.say("writing the report")
        written = write_report(cells, output or folders[0], markdown=markdown, plots=not no_plots, against=against)
    if as_json:
        listed = [row.model_dump(mode="json") for row in rows]
        against_it = [each.model_dump(mode="json") for each in comparisons]
        print_json(listed if against is None else {"rows": listed, "comparisons": against_it})
    elif not quiet:
        for path in written:
            click.echo(f"wrote {path}")
