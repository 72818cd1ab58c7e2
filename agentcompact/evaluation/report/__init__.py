"""Reports of an evaluation: an HTML page, Markdown, comma-separated values, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from agentcompact.errors import InputError, WriteError
from agentcompact.evaluation.report.content import build
from agentcompact.evaluation.report.csv_file import csv_text
from agentcompact.evaluation.report.drawing import png_bytes
from agentcompact.evaluation.report.html import html_text
from agentcompact.evaluation.report.markdown import markdown_text
from agentcompact.evaluation.report.plots import draw_all
from agentcompact.evaluation.report.table import comparison_table, terminal_tables
from agentcompact.evaluation.results import CellResult
from agentcompact.evaluation.store import RESULTS
from agentcompact.files import atomic_output

__all__ = ["check_markdown", "comparison_table", "terminal_tables", "write_report"]

PLOTS = "plots"


def write_report(
    cells: Sequence[CellResult],
    folder: Path,
    *,
    markdown: Path | None = None,
    plots: bool = True,
    against: str | None = None,
) -> list[Path]:
    """Write report.html, report.md, results.csv and plots/*.png into `folder`; return what was written.

    markdown: another place for the Markdown, its images in a folder of the file's name beside it. plots: whether
    there are figures; they need matplotlib. against: the strategy that the others are compared with. The same cells
    give the same bytes. Raises InputError where matplotlib is missing, before anything is written, and WriteError
    where a file cannot be.
    """
    content = build(cells, against)
    drawings = draw_all(content) if plots else []
    images = {f"{drawing.name}.png": png_bytes(drawing) for drawing in drawings}
    planned: dict[Path, bytes] = {
        folder / "report.html": html_text(content, drawings).encode(),
        folder / "report.md": markdown_text(content, drawings, PLOTS).encode(),
        folder / "results.csv": csv_text(content.rows).encode(),
        **{folder / PLOTS / name: data for name, data in images.items()},
    }
    if markdown is not None:
        check_markdown(markdown, folder)
        beside = markdown.with_suffix("") if markdown.suffix else markdown.with_name(f"{markdown.name}-images")
        planned[markdown] = markdown_text(content, drawings, quote(beside.name)).encode()
        planned.update({beside / name: data for name, data in images.items()})
    for path, data in planned.items():
        _write(path, data)
    return list(planned)


def check_markdown(path: Path, folder: Path) -> None:
    """Raise InputError for a path that is a file of the report in `folder` already, or holds results."""
    taken = [folder / name for name in (RESULTS, "report.html", "report.md", "results.csv")]
    if path.name == RESULTS or any(path.resolve() == other.resolve() for other in taken):
        raise InputError(f"{path} is a file of the results or of the report itself: name another one for the Markdown")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"the folder {path.parent} cannot be made: {error.strerror}") from error
    with atomic_output(path, overwrite=True, private=False) as part:
        part.write_bytes(data)
