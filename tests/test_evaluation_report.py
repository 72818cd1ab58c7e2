"""Summaries against values worked out by hand, and reports that are whole, escaped and always the same."""

from __future__ import annotations

import builtins
import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from rich.console import Console

from agentcompact.errors import DocumentError, InputError, WriteError
from agentcompact.evaluation.report import terminal_tables, write_report
from agentcompact.evaluation.report.columns import interval, number, plain, small
from agentcompact.evaluation.report.csv_file import csv_text
from agentcompact.evaluation.report.drawing import folded, label_logarithmic, legend, new_figure
from agentcompact.evaluation.report.markdown import code
from agentcompact.evaluation.results import FULL, NO_CONTEXT, CellResult, QuestionResult, latest
from agentcompact.evaluation.summary import SummaryRow, summarise
from agentcompact_cli.report import command

EVIL = "a_b <script>alert(1)</script> | *x* `y` [red]z[/red] $q$ &amp; _"
VOID = {"meta", "link", "br", "img", "hr", "input"}


def questions(*scores, kinds=(), choices=()):
    return [
        QuestionResult(
            score=score,
            kind=kinds[i] if kinds else "",
            choice=0 if choices else None,
            choice_score=choices[i] if choices else None,
        )
        for i, score in enumerate(scores)
    ]


def cell(strategy, *scores, document="d1", ratio=None, kinds=(), choices=(), **fields):
    return CellResult(
        **{
            "model": "tiny",
            "fingerprint": "f" * 20,
            "dtype": "float32",
            "task": "prose",
            "document": document,
            "digest": f"{document}{fields.get('length')}",
            "tokens": 100,
            "strategy": strategy,
            "ratio": ratio,
            "questions": questions(*scores, kinds=kinds, choices=choices),
            **fields,
        }
    )


def failure(strategy, document="d1", error="RuntimeError: no\n memory", **fields):
    return cell(strategy, document=document, status="failed", error=error, **fields)


def row_of(cells, strategy, ratio=None):
    return next(row for row in summarise(cells) if (row.strategy, row.ratio) == (strategy, ratio))


@pytest.fixture(scope="module")
def cells():
    """Two documents, strategies with names that mean something in every language of a report, and failures."""
    made = []
    for document, best in (("d1", 1.0), ("d|2 <b>", 0.5)):
        common = {
            "document": document,
            "kinds": ("who", "a|<i>"),
            "choices": (1.0, 0.0),
            "decode_tokens_per_second": 20,
        }
        made.append(cell(FULL, 1.0, best, held_positions=100, prefill_seconds=2.0, bytes=4_000_000, **common))
        made.append(cell(NO_CONTEXT, 0.0, 0.0, **common))
        for strategy, shift in (("two_pass", 0), (EVIL, 3), ("=cmd", 1)):
            for ratio in (4.0, 8.0):
                made.append(
                    cell(
                        strategy,
                        1.0,
                        0.0,
                        ratio=ratio,
                        kl=0.1,
                        top1=0.9,
                        output_error=0.00001,
                        held_positions=100 / ratio,
                        prefill_seconds=2.0,
                        compaction_seconds=1.0,
                        bytes=1_000_000,
                        entries_per_head=[[10, 10 + shift], [20, 20]],
                        versions={"torch": "2.9"},
                        warnings=["a <warning>"],
                        **common,
                    )
                )
    made.append(failure("broken <x>", ratio=4.0, error="ValueError: a <b> | `c` [bold]d[/bold]"))
    return made


@pytest.fixture(scope="module")
def written(cells, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    paths = write_report(cells, folder / "new", markdown=folder / "docs" / "my results.md")
    return folder, paths


def test_accuracy_interval_and_counts():
    made = [cell("s", 1, 0, 1, 1, ratio=4), cell("s", 0, 0, document="d2", ratio=4)]
    (row,) = summarise(made)
    assert (row.documents, row.failed, row.questions) == (2, 0, 6)
    assert row.accuracy == pytest.approx(0.5)  # of all questions, not of documents
    assert 0 <= row.accuracy_low < 0.5 < row.accuracy_high <= 1
    assert row.choice_accuracy is None
    assert row.choice_low is None
    assert row.kinds == {}
    assert row.utility is None  # neither full nor no_context


def test_questions_without_answers_do_not_count():
    (row,) = summarise([cell("s", None, 1.0, None, choices=(1.0, 0.0, 0.0))])
    assert (row.questions, row.choices, row.accuracy) == (1, 3, 1.0)
    assert row.choice_accuracy == pytest.approx(1 / 3)
    (row,) = summarise([cell("s", None)])
    assert (row.accuracy, row.accuracy_low) == (None, None)


def test_utility_is_over_documents_that_worked_with_all_three():
    made = [
        cell(FULL, 1, 1, choices=(1, 0)),
        cell(FULL, 1, 0, document="d2", choices=(1, 0)),
        cell(FULL, 0, 0, document="d3", choices=(1, 1)),
        cell(NO_CONTEXT, 0, 0, choices=(1, 0)),
        cell(NO_CONTEXT, 1, 0, document="d2", choices=(1, 0)),
        cell("s", 1, 0, ratio=4, choices=(0, 0)),
        cell("s", 1, 1, document="d2", ratio=4, choices=(0, 0)),
        cell("s", 1, 1, document="d3", ratio=4, choices=(0, 0)),
        failure(NO_CONTEXT, document="d3"),
    ]
    assert row_of(made, FULL).utility == 100
    assert row_of(made, NO_CONTEXT).utility == 0
    # d1 and d2: own 3/4, full 3/4, none 1/4; d3 has no no_context.
    assert row_of(made, "s", 4).utility == pytest.approx(100)
    assert row_of(made, "s", 4).accuracy == pytest.approx(5 / 6)
    assert row_of(made, "s", 4).choice_utility is None  # full is not above none
    assert row_of(made, FULL).choice_utility is None


def test_measures_are_means_over_documents():
    shared = {"prefill_seconds": 2.0, "ratio": 4}
    made = [
        cell(FULL, held_positions=100, decode_tokens_per_second=10),
        cell(FULL, document="d2", held_positions=300, decode_tokens_per_second=30),
        cell("s", kl=0.1, compaction_seconds=1.0, held_positions=25, bytes=10, decode_tokens_per_second=20, **shared)
        .model_copy(update={"entries_per_head": [[1, 2], [3, 4]]}),
        cell("s", document="d2", kl=0.3, compaction_seconds=4.0, held_positions=50, bytes=30, overlap=0.5,
             decode_tokens_per_second=30, entries_per_head=[[10, 10]], **shared),
    ]  # fmt: skip
    row = row_of(made, "s", 4)
    assert row.kl == pytest.approx(0.2)
    assert row.compaction_seconds == pytest.approx(2.5)
    assert row.compaction_per_prefill == pytest.approx((0.5 + 2) / 2)
    assert row.entries == 15
    assert row.bytes == 20
    assert row.held_positions == 37.5
    assert row.reached_ratio == pytest.approx((4 + 6) / 2)
    assert row.decode_tokens_per_second == 25
    assert row.relative_decode == pytest.approx((2 + 1) / 2)
    assert row.overlap == 0.5
    assert row.top1 is None
    assert row_of(made, FULL).reached_ratio == 1
    assert row_of(made, FULL).compaction_per_prefill is None


def test_kinds():
    made = [
        cell("s", 1, 0, 1, kinds=("who", "when", "who"), choices=(0, 1, None)),
        cell("s", 0, None, document="d2", kinds=("who", "")),
    ]
    kinds = summarise(made)[0].kinds
    assert list(kinds) == ["", "when", "who"]
    assert (kinds["who"].questions, kinds["when"].questions, kinds[""].questions) == (3, 1, 0)
    assert kinds["who"].accuracy == pytest.approx(2 / 3)
    assert (kinds["who"].choice_accuracy, kinds["when"].choice_accuracy) == (0, 1)
    assert kinds[""].accuracy is None


def test_seeds_of_a_document_are_one_document():
    made = [cell("s", 1, 0, ratio=4), cell("s", 0, 0, ratio=4, seed=1, kl=0.5), cell("s", 1, document="d2", ratio=4)]
    (row,) = summarise(made)
    assert (row.documents, row.questions) == (2, 3)
    assert row.accuracy == pytest.approx((0.5 + 0 + 1) / 3)


def test_later_results_supersede_earlier_ones():
    made = [failure("s", ratio=4), cell("s", 0, ratio=4, seed=1), cell("s", 1, ratio=4)]
    kept = list(latest(made).values())
    assert [(c.seed, c.status) for c in kept] == [(0, "ok"), (1, "ok")]
    (row,) = summarise(made)
    assert (row.failed, row.error, row.accuracy) == (0, None, 0.5)


def test_failed_cells():
    made = [failure("s", ratio=4), cell("s", 1, document="d2", ratio=4)]
    made += [failure("t", ratio=4), failure("t", "d2", None, ratio=4)]
    some, none = summarise(made)
    assert (some.documents, some.failed, some.accuracy) == (1, 1, 1.0)
    assert some.error == "RuntimeError: no\n memory"
    assert (none.documents, none.failed, none.questions, none.accuracy) == (0, 2, 0, None)


def test_order_of_rows():
    names = [("z", 4.0), (NO_CONTEXT, None), ("b", 8.0), ("a", 8.0), ("a", 4.0), (FULL, None)]
    made = [cell(name, 1, ratio=ratio, length=length) for length in (200, 100) for name, ratio in names]
    made += [
        cell(FULL, 1),
        cell("a", 1, ratio=4, model="another", fingerprint="e" * 20),
        cell("a", 1, ratio=4, task="agents", document="d9"),
    ]
    found = [(r.model, r.task, r.length, r.strategy, r.ratio) for r in summarise(made)]
    assert [row[:3] for row in found[:3]] == [
        ("another", "prose", None),
        ("tiny", "agents", None),
        ("tiny", "prose", None),
    ]
    expected = [(FULL, None), ("a", 4.0), ("z", 4.0), ("a", 8.0), ("b", 8.0), (NO_CONTEXT, None)]
    assert [row[2:] for row in found[3:]] == [(length, *name) for length in (100, 200) for name in expected]


def test_texts():
    assert number(None, ".1f") == "n/a"
    assert interval(0.712, 0.66, 0.7589) == "71.2 (66.0-75.9)"
    assert interval(None, None, None) == "n/a"
    assert [small(0.0), small(0.25), small(0.00001), small(None)] == ["0.000", "0.250", "1.0e-05", "n/a"]
    assert plain("a\x1b[31mb\n\tc\x00") == "a?[31mb c?"
    assert code("a`b``c") == "```a`b``c```"
    assert code("`a") == "`` `a ``"


def test_csv_reads_back(cells):
    rows = summarise(cells)
    read = list(csv.DictReader(io.StringIO(csv_text(rows), newline="")))
    assert len(read) == len(rows)
    for line, row in zip(read, rows, strict=True):
        values = {name: (None if text == "" else text) for name, text in line.items()}
        values["kinds"] = json.loads(values["kinds"]) if values["kinds"] else {}
        assert SummaryRow.model_validate(values) == row


class Page(HTMLParser):
    """Checks that tags nest, and collects what the tests ask about."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name == "href":
                self.references += [value[1:]] if value.startswith("#") else []
                assert value.startswith(("#", "data:"))
            else:
                self.references += re.findall(r"url\(#([^)]*)\)", value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_labels_that_differ_at_their_end_are_told_apart():
    words = [f"ttt:initialiser=mix:preset=fast:stage2_updates=0:{end}" for end in ("biases=false", "match_mass=false")]
    lines = [folded(word) for word in words]
    assert ["".join(each) for each in lines] == words
    assert all(len(line) <= 42 for each in lines for line in each)
    assert folded("two_pass, 8x") == ["two_pass, 8x"]
    assert folded("x" * 100) == ["x" * 41 + "…"]
    figure = new_figure("title", 6.4, 3.9)
    handles = [*figure.subplots().plot([1], [[1, 2]])]
    legend(figure, handles, words)
    assert ["".join(text.get_text().split()) for text in figure.legends[0].get_texts()] == words


def test_html_is_whole_and_needs_nothing_else(written, cells):
    text = (written[0] / "new" / "report.html").read_text()
    assert "http" not in text
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "img", "i", "b", "red"}
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
    for strategy in {c.strategy for c in cells}:
        assert strategy in page.text
    assert "ValueError: a <b> | `c` [bold]d[/bold]" in page.text
    assert "a <warning>" in page.text
    assert "n/a" in page.text
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 3
    assert all(d["role"] == "img" and "prose: tiny (float32)" in d["aria-label"] for d in drawings)


def test_markdown(written, cells):
    text = (written[0] / "new" / "report.md").read_text()
    for strategy in {c.strategy for c in cells}:
        assert code(strategy).replace("|", "\\|") in text
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 3  # all measures, and two by kind
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
        assert len({len(line) for line in table.splitlines()}) == 1  # aligned in the source too
    assert "| `full` " in text
    assert " ----: |" in text
    assert "n/a" in text
    images = re.findall(r"!\[[^\n]*\]\(([^)]*)\)", text)
    assert len(images) == 3
    assert all((written[0] / "new" / image).is_file() for image in images)


def test_markdown_elsewhere_has_its_images_beside_it(written):
    docs = written[0] / "docs"
    text = (docs / "my results.md").read_text()
    assert len(re.findall(r"\]\(my%20results/[^)]*\.png\)", text)) == 3
    assert len(list((docs / "my results").glob("*.png"))) == 3


def test_written_paths_and_bytes_are_always_the_same(written, cells, tmp_path):
    folder, paths = written
    assert all(path.is_file() for path in paths)
    assert {path.name for path in paths[:3]} == {"report.html", "report.md", "results.csv"}
    for path in write_report(cells, tmp_path):
        assert path.read_bytes() == (folder / "new" / path.relative_to(tmp_path)).read_bytes()


def test_plots_are_pictures(written):
    for path in (written[0] / "new" / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_state_of_matplotlib_changes(cells, tmp_path):
    import sys

    import matplotlib

    before = dict(matplotlib.rcParams)
    loaded = "matplotlib.pyplot" in sys.modules
    write_report(cells[:4], tmp_path)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_lengths_have_a_column_and_panels(tmp_path):
    made = [
        cell(name, 1, 0, ratio=ratio, length=length, compaction_seconds=seconds, prefill_seconds=1.0)
        for length in (1000, 2000)
        for name, ratio, seconds in ((FULL, None, None), ("s", 4.0, 0.01), ("t", 4.0, 1.0), ("s", 8.0, 0.01))
    ]
    write_report(made, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "accuracy, length 1,000" in text
    assert "accuracy, length 2,000" in text
    assert ">length</th>" in text


def test_divergence_is_drawn_where_no_question_was_scored(tmp_path):
    made = [cell("s", ratio=ratio, kl=ratio / 10) for ratio in (4.0, 8.0)]
    paths = write_report(made, tmp_path)
    assert [path.name for path in paths[3:]] == ["01-prose-tiny-float32-ratio.png"]
    assert "KL divergence against ratio" in paths[0].read_text()


def no_matplotlib(monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(f"No module named {name!r}")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_matplotlib(monkeypatch, cells, tmp_path):
    no_matplotlib(monkeypatch)
    with pytest.raises(InputError, match=r'pip install "agentcompact\[eval\]"'):
        write_report(cells, tmp_path)
    assert list(tmp_path.iterdir()) == []
    paths = write_report(cells, tmp_path, plots=False)
    assert [path.name for path in paths] == ["report.html", "report.md", "results.csv"]
    assert "<svg" not in paths[0].read_text()
    assert "![" not in paths[1].read_text()
    assert printed(cells, 100)


def test_folder_that_cannot_be_made(cells, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="file"):
        write_report(cells, tmp_path / "file", plots=False)


def printed(cells, width):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(*terminal_tables(summarise(cells), width), sep="\n")
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_terminal_tables_fit(cells, width):
    text = printed(cells, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "1 failed [1]" in text
    squeezed = re.sub(r"\s+", " ", text)
    assert "[1] broken <x> at 4x: 1 failed, ValueError: a <b> | `c` [bold]d[/bold]" in squeezed
    assert "…" not in text
    assert ("too narrow here" in squeezed) == (width < 250)
    assert "prose: tiny (float32)" in text
    assert "utility" in text


def test_terminal_shows_markup_as_it_is(cells):
    assert EVIL[:20] in printed(cells, 250)
    assert "[red]z[/red]" in printed(cells, 250)


def test_terminal_prefers_choices_where_there_are_no_answers():
    made = [cell(name, None, None, ratio=ratio, choices=(1.0, 0.0)) for name, ratio in ((FULL, None), ("s", 4.0))]
    assert "choices" in printed(made, 40)


def results(folder, cells, end=""):
    folder.mkdir(exist_ok=True)
    lines = [c.model_dump_json() for c in cells]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n" + end)
    return folder


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)


@pytest.fixture
def terminal(monkeypatch):
    """The console writes to standard output as it is when it prints."""
    monkeypatch.setattr("agentcompact_cli.report.out", Console(highlight=False, width=120))


def test_command(terminal, cells, tmp_path):
    folder = results(tmp_path / "run", cells, end='{"model": "ti')
    found = call(folder, "--no-plots")
    assert found.exception is None
    assert "prose: tiny (float32)" in found.output
    assert "cut off" in found.stderr
    assert f"wrote {folder}/report.html" in found.output
    assert (folder / "results.csv").is_file()


def test_command_with_several_folders(terminal, cells, tmp_path):
    one, two = results(tmp_path / "1", cells), results(tmp_path / "2", [cell("two_pass", 0, 0, ratio=4.0)])
    refused = call(one, two)
    assert isinstance(refused.exception, InputError)
    assert "--output" in str(refused.exception)
    found = call(
        one, two, "--output", tmp_path / "both", "--json", "--no-plots", "--markdown", tmp_path / "docs" / "r.md"
    )
    assert found.exception is None
    rows = [SummaryRow.model_validate(row) for row in json.loads(found.stdout)]
    assert rows == summarise([*cells, cell("two_pass", 0, 0, ratio=4.0)])
    assert (tmp_path / "both" / "report.md").is_file()
    assert (tmp_path / "docs" / "r.md").is_file()


def test_command_quiet(terminal, cells, tmp_path):
    found = call(results(tmp_path / "run", cells), "--quiet", "--no-plots")
    assert "wrote" not in found.output
    assert found.stderr == ""


def test_command_refuses(cells, tmp_path):
    found = call(tmp_path / "none")
    assert isinstance(found.exception, DocumentError)
    assert "no results" in str(found.exception)
    broken = results(tmp_path / "broken", cells[:2], end="{}\n")
    assert "line 3" in str(call(broken).exception)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "results.jsonl").write_text("")
    assert "no results" in str(call(tmp_path / "empty").exception)


def test_drawings_are_well_formed(written):
    text = (written[0] / "new" / "report.html").read_text()
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        root = ElementTree.fromstring(svg)
        assert not any("}" in element.tag for element in root.iter())


def test_labels_of_a_logarithmic_axis_are_few():
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    axis.set_xscale("log")
    axis.set_xlim(1.2, 80)
    label_logarithmic(axis.xaxis, "{:g}x".format)
    low, high = axis.get_xlim()
    places = [each for each in axis.xaxis.get_majorticklocs() if low <= each <= high]
    assert places == [2, 5, 10, 20, 50]
    assert axis.xaxis.get_major_formatter()(20, 0) == "20x"
    assert axis.xaxis.get_minor_formatter()(30, 0) == ""
