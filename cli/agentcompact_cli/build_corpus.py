"""`agentcompact build-corpus`: texts to train a writer on, from folders and from packages."""

from __future__ import annotations

from pathlib import Path

import click

from agentcompact_cli.console import out, print_json, working
from agentcompact_cli.options import output_options


@click.command(name="build-corpus")
@click.option("--folder", "folders", multiple=True, type=click.Path(path_type=Path), help="Texts of yours; repeatable.")
@click.option("--debian", multiple=True, metavar="PACKAGE", help="A Debian package that holds texts; repeatable.")
@click.option("--pypi", multiple=True, metavar="PACKAGE", help="A PyPI package that holds texts; repeatable.")
@click.option("--per-source", type=click.IntRange(min=1), default=100, show_default=True, help="Documents of each.")
@click.option(
    "--smallest", type=click.IntRange(min=1), default=6000, show_default=True, help="Characters of a document at least."
)
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="JSONL file to write.")
@click.option("--force", "-f", is_flag=True, help="Replace it if it exists.")
@output_options
def command(
    folders: tuple[Path, ...],
    debian: tuple[str, ...],
    pypi: tuple[str, ...],
    per_source: int,
    smallest: int,
    output: Path,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Gather the English texts of folders and packages into one file for train-writer.

    Packages are downloaded by apt-get and pip and only read; see docs/fast_diamond.md for some and their licences.

    \b
    Example:
      agentcompact build-corpus --folder notes/ --debian git-doc --debian perl-doc -o corpus.jsonl
    """
    from agentcompact.training import CorpusOptions, build_corpus

    with working(quiet) as work:
        counts = build_corpus(
            output,
            folders=folders,
            debian=debian,
            pypi=pypi,
            options=CorpusOptions(smallest=smallest, per_source=per_source),
            overwrite=force,
            say=work.say,
        )
    if as_json:
        print_json({"output": str(output), "documents": counts})
        return
    for name, count in counts.items():
        out.print(f"  {count:5,}  {name}", markup=False)
    out.print(f"{sum(counts.values()):,} documents in {output}", markup=False)
