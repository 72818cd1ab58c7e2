"""Drawings without global state: style, colours, and how one becomes a PNG or an SVG that can stand in a page."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from agentcompact.errors import InputError
from agentcompact.evaluation.report.columns import plain

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours without the yellow, then some of Paul Tol's: told apart by the colour-blind.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#332288",
    "#882255",
    "#999933",
    "#44AA99",
)
MARKERS = "osD^vPX*<>"
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
INK = "#333333"
PNG_DPI = 200
LABEL = 42
LETTERS_AN_INCH = 14.5
LEGEND_LINE = 0.2
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e5e5",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Drawing:
    """A figure with the words that stand in for it; `name` is its file's, `section` the part of the report."""

    name: str
    title: str
    alt: str
    section: int
    figure: Figure


@contextmanager
def drawing_style(name: str = "") -> Iterator[None]:
    """Draw in this style, whatever the user's own settings are; name: what the ids in an SVG are made from.

    Raises InputError where matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of caches and fonts that nobody asked about
    try:
        from matplotlib import style
    except ImportError as error:
        raise InputError(
            'the plots of a report need matplotlib: pip install "agentcompact[eval]", or leave them out with --no-plots'
        ) from error
    with style.context(["default", {**STYLE, "svg.hashsalt": f"agentcompact {name}"}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names in other scripts
        yield


def new_figure(title: str, width: float, height: float) -> Figure:
    """Make an empty figure with a title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(short(title, 90), parse_math=False, fontsize=11, fontweight="bold", wrap=True)
    return figure


def settle(figure: Figure) -> None:
    """Lay the figure out once, for all files made of it: that takes most of the time."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)


def label_logarithmic(axis: Axis, written: Callable[[float], str]) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of each power of ten alone, so that labels never run into each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
    axis.set_minor_formatter(NullFormatter())


def short(text: str, length: int = LABEL) -> str:
    """Cut a label from elsewhere to what a figure has room for."""
    line = plain(text)
    return line if len(line) <= length else f"{line[: length - 1]}…"


def folded(text: str, length: int = LABEL) -> list[str]:
    """Break a long label at the colons between its settings: strategies may differ in the last of them alone."""
    lines = [""]
    for part in re.findall(r"[^:]*:|[^:]+", plain(text)):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return [short(line, length) for line in lines]


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put a legend below the figure, in as many columns as fit."""
    if not handles:
        return
    texts = [folded(label) for label in labels]
    room = int(figure.get_figwidth() * LETTERS_AN_INCH)
    columns = max(1, min(len(texts), room // (max(len(line) for text in texts for line in text) + 7)))
    each = -(-len(texts) // columns)
    height = max(sum(map(len, texts[first : first + each])) for first in range(0, len(texts), each))
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * height)
    # Labels are set afterwards: a legend leaves out those that begin with an underscore, and reads $ as mathematics.
    below = figure.legend(handles, ["."] * len(texts), loc="outside lower center", ncols=columns, fontsize=9)
    for entry, text in zip(below.get_texts(), texts, strict=True):
        entry.set_parse_math(False)
        entry.set_text("\n".join(text))


def png_bytes(drawing: Drawing) -> bytes:
    """Draw it as a PNG."""
    target = io.BytesIO()
    with drawing_style(drawing.name):
        drawing.figure.savefig(target, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return target.getvalue()


def svg_text(drawing: Drawing) -> str:
    """Draw it as an SVG element for HTML: no namespaces, no metadata, and ids that no other drawing has."""
    target = io.BytesIO()
    with drawing_style(drawing.name):
        drawing.figure.savefig(target, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(target.getvalue())
    for child in list(root):
        if child.tag.endswith("}metadata"):
            root.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({name: _own(name, value, drawing.name) for name, value in attributes.items()})
    root.attrib.update({"role": "img", "aria-label": drawing.alt})
    return ElementTree.tostring(root, encoding="unicode")


def _own(name: str, value: str, prefix: str) -> str:
    """Make an id, or a reference to one, the drawing's own."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return re.sub(r"url\(#", f"url(#{prefix}-", value)
