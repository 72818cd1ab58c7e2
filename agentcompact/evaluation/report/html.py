"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from agentcompact.evaluation.report.answers import answer_grid
from agentcompact.evaluation.report.columns import MISSING
from agentcompact.evaluation.report.content import Content
from agentcompact.evaluation.report.drawing import Drawing, svg_text

TEMPLATE = "report.html.jinja"


def html_text(content: Content, drawings: Sequence[Drawing] = ()) -> str:
    """Write the page, with the drawings as inline SVG."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    parts = [
        (
            section,
            section.grids(),
            answer_grid(section, content.cells),
            # Drawn here, with every text escaped; nothing of it comes from elsewhere as markup.
            [(drawing, Markup(svg_text(drawing))) for drawing in drawings if drawing.section == index],
        )
        for index, section in enumerate(content.sections)
    ]
    return environment.from_string(source).render(content=content, parts=parts, missing=MISSING)
