"""Strategies against one of them, on the same questions."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from agentcompact.errors import SettingsError
from agentcompact.evaluation import CellResult, QuestionResult
from agentcompact.evaluation.comparison import compare
from agentcompact.evaluation.statistics import paired_bootstrap
from agentcompact_cli.report import command


def cell(strategy, document, scores, task="needles", ratio=8.0, **more):
    return CellResult(
        model="m<1>",
        fingerprint="f",
        dtype="float32",
        task=task,
        document=document,
        digest=f"{task}/{document}",
        tokens=100,
        strategy=strategy,
        ratio=ratio,
        questions=[QuestionResult(score=score) for score in scores],
        **more,
    )


CELLS = [
    cell("kvzip", "a", [1, 0, 0]),
    cell("kvzip", "b", [0, 0]),
    cell("best|x", "a", [1, 1, None]),
    cell("best|x", "b", [0, 1]),
    cell("kvzip", "c", [1], task="records"),
    cell("best|x", "c", [0], task="records"),
    cell("best|x", "c", [1], task="records", ratio=16.0),
    cell("best|x", "d", [], status="failed", error="no"),
]


def test_differences_are_of_the_same_questions():
    found = {(each.task, each.ratio): each for each in compare(CELLS, "kvzip")}
    assert set(found) == {("needles", 8), ("records", 8), ("all tasks", 8)}
    needles = found["needles", 8]
    assert (needles.strategy, needles.documents, needles.questions) == ("best|x", 2, 4)
    assert (needles.accuracy, needles.other_accuracy, needles.difference) == (0.75, 0.25, 0.5)
    assert (needles.low, needles.high) == paired_bootstrap([[1, 1], [0, 1]], [[1, 0], [0, 0]])[1]
    assert found["all tasks", 8].questions == 5
    assert found["all tasks", 8].difference == pytest.approx((0 + 1 + 0 + 1 - 1) / 5)
    with pytest.raises(SettingsError, match="no result is labelled 'kvzi', did you mean 'kvzip'"):
        compare(CELLS, "kvzi")


def test_the_report_shows_them(tmp_path):
    lines = [each.model_dump_json(exclude_defaults=True) + "\n" for each in CELLS]
    (tmp_path / "results.jsonl").write_text("".join(lines))
    made = CliRunner().invoke(command, [str(tmp_path), "--against", "kvzip", "--no-plots", "-q"])
    assert made.exit_code == 0, made.output
    assert "+50.0" in made.output
    markdown, page = ((tmp_path / name).read_text() for name in ("report.md", "report.html"))
    assert "## Comparison" in markdown
    assert "`best\\|x`" in markdown
    assert "Against kvzip" in page
    assert "m&lt;1&gt;" in page
    made = CliRunner().invoke(command, [str(tmp_path), "--against", "kvzip", "--no-plots", "-q", "--json"])
    assert {each["task"] for each in json.loads(made.output)["comparisons"]} == {"needles", "records", "all tasks"}
