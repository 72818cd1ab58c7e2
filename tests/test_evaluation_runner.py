"""The runner: one prefill a document, results that survive anything, and cells that fail alone."""

from __future__ import annotations

import json
import random

import pytest
from tiny import tiny_model, tiny_text

import agentcompact.strategies.registry as registry
from agentcompact.engines import TransformersEngine
from agentcompact.errors import BudgetError, DocumentError, InputError, SettingsError, WriteError
from agentcompact.evaluation import (
    FULL,
    NO_CONTEXT,
    Document,
    EvaluationPlan,
    Question,
    choose_strategies,
    evaluate,
    read_documents,
    read_results,
    summarise,
)
from agentcompact.evaluation.store import open_store
from agentcompact.strategies.base import Strategy

TIMINGS = ("prefill_seconds", "compaction_seconds", "decode_tokens_per_second")


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"))


def document(number, length=80):
    questions = [
        Question(
            question=tiny_text(4 + index, seed=100 * number + index),
            answers=(f"w{5 + index}",),
            options=(" w5", " w6 w7"),
            label=index % 2,
            kind=("path", "number")[index % 2],
            max_new_tokens=5,
        )
        for index in range(3)
    ]
    return Document(
        id=f"doc {number}/x", task="own", context=tiny_text(length, seed=number), questions=tuple(questions)
    )


DOCUMENTS = [document(1), document(2)]


def plan(strategies=("none", "two_pass", "high_attn:budgets=global"), ratios=(2, 4), **changes):
    return EvaluationPlan(choose_strategies(strategies), ratios, **changes)


def untimed(cells):
    return [cell.model_dump(exclude=set(TIMINGS)) for cell in cells]


def test_none_equals_the_full_cache_in_every_metric(engine, tmp_path):
    cells = evaluate(engine, DOCUMENTS, plan(), tmp_path)
    by_name = {(cell.document, cell.strategy, cell.ratio): cell for cell in cells}
    assert len(by_name) == len(cells) == 2 * (2 + 3 * 2)
    for name in ("doc 1/x", "doc 2/x"):
        full = by_name[name, FULL, None]
        assert full.status == "ok"
        assert (full.kl, full.top1, full.output_error, full.mass_error, full.overlap) == (0, 1, 0, 0, 1)
        for ratio in (2, 4):
            none = by_name[name, "none", ratio]
            same = ("questions", "kl", "top1", "output_error", "mass_error", "log_mass_error", "overlap",
                    "entries_per_head", "held_positions", "tokens")  # fmt: skip
            assert [getattr(none, field) for field in same] == [getattr(full, field) for field in same]
            small = by_name[name, "two_pass", ratio]
            assert small.held_positions == 80 / ratio
            assert small.kl > 0
            assert small.compaction_seconds > 0
            assert small.prefill_seconds == full.prefill_seconds
            assert sum(map(sum, by_name[name, "high_attn:budgets=global", ratio].entries_per_head)) == 4 * 80 / ratio
    rows = {(row.strategy, row.ratio): row for row in summarise(cells)}
    assert rows["none", 2].accuracy == rows[FULL, None].accuracy
    assert rows[FULL, None].kinds["path"].questions == 4


def test_the_document_is_prefilled_once(tmp_path):
    engine = TransformersEngine(tiny_model("llama"))
    evaluate(engine, DOCUMENTS[:1], plan(metrics=frozenset({"answers"})), tmp_path)
    questions = sum(len(question.question.split()) for question in DOCUMENTS[0].questions)
    beginning = len(engine.beginning())
    warm_up, prompts, without = 32, 7 * questions, questions + 3 * beginning
    assert engine.counters.prefilled_tokens == warm_up + 80 + beginning + prompts + without


def test_the_same_seed_gives_the_same_results(engine, tmp_path):
    first = untimed(evaluate(engine, DOCUMENTS, plan(), tmp_path / "a"))
    assert untimed(evaluate(engine, DOCUMENTS, plan(), tmp_path / "b")) == first
    other = evaluate(engine, DOCUMENTS, plan(seed=1), tmp_path / "a")
    assert {cell.seed for cell in other} == {1}


def test_a_run_goes_on_where_it_was_cut_at_any_byte(engine, tmp_path):
    """Results cut anywhere, also within a line, are completed without repeating a cell that is whole."""
    whole = evaluate(engine, DOCUMENTS, plan(), tmp_path / "whole")
    data = (tmp_path / "whole" / "results.jsonl").read_bytes()
    rng = random.Random(0)
    cuts = [
        0,
        1,
        data.index(b"\n"),
        data.index(b"\n") + 1,
        len(data) - 1,
        *(rng.randrange(len(data)) for _ in range(6)),
    ]
    for number, cut in enumerate(cuts):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "results.jsonl").write_bytes(data[:cut])
        steps = []
        cells = evaluate(engine, DOCUMENTS, plan(), folder, steps.append)
        assert untimed(cells) == untimed(whole)
        kept = data[:cut].count(b"\n")
        assert len(steps) == len(whole) - kept
        assert (folder / "results.jsonl").read_bytes().startswith(data[:cut][: data[:cut].rfind(b"\n") + 1])
        assert len(read_results(folder)[0]) == len(whole)


def test_more_is_added_and_nothing_repeated(engine, tmp_path):
    steps = []
    evaluate(engine, DOCUMENTS[:1], plan(["two_pass"], [2], metrics=frozenset({"answers"})), tmp_path, steps.append)
    assert [step.cell.strategy for step in steps] == [FULL, NO_CONTEXT, "two_pass"]
    assert (steps[-1].done, steps[-1].total, steps[-1].seconds_left) == (3, 3, 0)
    assert steps[-1].cell.kl is None
    assert steps[-1].cell.decode_tokens_per_second is None
    evaluate(engine, DOCUMENTS, plan(["two_pass"], [2, 4], metrics=frozenset({"answers"})), tmp_path, steps.append)
    assert [step.cell.document for step in steps[3:]] == ["doc 1/x"] + ["doc 2/x"] * 4
    evaluate(engine, DOCUMENTS[:1], plan(["two_pass"], [2], metrics=frozenset({"fidelity"})), tmp_path, steps.append)
    assert len(steps) == 8 + 3  # measured again for the metric that was missing
    assert steps[-1].cell.kl > 0
    assert len(summarise(read_results(tmp_path)[0])) == 4
    kept = [path for path in (tmp_path / "documents").iterdir() if path.name.startswith("doc_1_x-")]
    assert [read_documents(path) for path in kept] == [DOCUMENTS[:1]]


class Failing(Strategy):
    name = "failing"
    summary = "fails"

    def compact_spans(self, request, spans, phases, report):
        raise ZeroDivisionError("division by\nnothing")


def test_a_failing_cell_is_recorded_and_does_not_stop_the_others(engine, tmp_path, monkeypatch):
    monkeypatch.setitem(registry._registered, "failing", Failing)
    chosen = plan(["failing", "two_pass"], [2])
    cells = evaluate(engine, DOCUMENTS[:1], chosen, tmp_path)
    assert [(cell.strategy, cell.status) for cell in cells] == [
        (FULL, "ok"), (NO_CONTEXT, "ok"), ("failing", "failed"), ("two_pass", "ok"),
    ]  # fmt: skip
    assert cells[2].error == "ZeroDivisionError: division by"
    assert cells[2].questions == []
    steps = []
    evaluate(engine, DOCUMENTS[:1], chosen, tmp_path, steps.append)
    assert steps == []
    monkeypatch.setattr(Failing, "compact_spans", lambda *arguments: list(arguments[2]))
    again = evaluate(engine, DOCUMENTS[:1], plan(["failing", "two_pass"], [2], retry_failed=True), tmp_path)
    assert [cell.status for cell in again] == ["ok"] * 4
    assert [row.failed for row in summarise(read_results(tmp_path)[0])] == [0] * 4


def test_a_document_that_does_not_fit_fails_and_the_next_goes_on(engine, tmp_path):
    cells = evaluate(engine, [document(3, length=600), DOCUMENTS[0]], plan(["two_pass"], [2]), tmp_path)
    assert [cell.status for cell in cells] == ["failed"] * 3 + ["ok"] * 3
    assert {cell.error for cell in cells[:3]} == {cells[0].error}
    assert "do not fit the model's context of 512" in cells[0].error
    assert cells[0].tokens == 600 + len(engine.beginning())


def test_questions_of_a_document_without_a_room_for_them(engine, tmp_path):
    """The document fits, a question does not: the cells say so instead of ending the run."""
    cells = evaluate(engine, [document(3, length=505)], plan(["two_pass"], [2]), tmp_path)
    assert {cell.status for cell in cells} == {"failed"}
    assert "an answer of up to 5" in cells[0].error


def test_an_interruption_loses_nothing(engine, tmp_path):
    def stop(step):
        if step.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, DOCUMENTS, plan(), tmp_path, stop)
    assert len(read_results(tmp_path)[0]) == 4
    assert len(evaluate(engine, DOCUMENTS, plan(), tmp_path)) == 16  # the lock is free again


def test_one_process_writes(engine, tmp_path):
    with open_store(tmp_path), pytest.raises(InputError, match="by another evaluation"):
        evaluate(engine, DOCUMENTS, plan(), tmp_path)


def test_folders_that_hold_something_else(engine, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="file"):
        evaluate(engine, DOCUMENTS, plan(), tmp_path / "file" / "results")
    (tmp_path / "results.jsonl").write_text('{"model": "x"}\n')
    with pytest.raises(DocumentError, match=r"results.jsonl line 1 is no result"):
        evaluate(engine, DOCUMENTS, plan(), tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == '{"model": "x"}\n'
    with pytest.raises(DocumentError, match="holds no results"):
        read_results(tmp_path / "nowhere")


def test_results_are_json_that_every_program_reads(engine, tmp_path):
    evaluate(engine, DOCUMENTS[:1], plan(), tmp_path)

    def refuse(constant):
        raise ValueError(constant)

    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=refuse)["document"] == "doc 1/x"


def test_plans_that_cannot_be():
    with pytest.raises(SettingsError, match="there is no metric 'speeed', did you mean 'speed'"):
        plan(metrics=frozenset({"speeed"}))
    with pytest.raises(BudgetError):
        plan(ratios=[0.5])


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["two_pass", "two_pass"], ["two_pass"]),
        (["two_pass:shortlist=5"], ["two_pass"]),
        (["high_attn:queries=repeat_prefill:budgets=global"], ["high_attn:budgets=global:queries=repeat_prefill"]),
        (["two_pass:count_rest=true:shortlist=3.5"], ["two_pass:count_rest=true:shortlist=3.5"]),
    ],
)
def test_strategies_in_one_word(words, labels):
    chosen = choose_strategies(words)
    assert [choice.label for choice in chosen] == labels
    assert [choice.label for choice in choose_strategies(labels)] == labels


def test_all_strategies_leave_out_the_full_cache():
    labels = [choice.label for choice in choose_strategies(["all"])]
    assert "none" not in labels
    assert {"two_pass", "high_attn", "streaming_llm"} <= set(labels)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("two_pas", "did you mean 'two_pass'"),
        ("two_pass:shortlst=3", "did you mean 'shortlist'"),
        ("two_pass:score=sum", "score='sum'"),
        ("full", "'full' is always measured"),
        ("two_pass:shortlist", "there is no strategy 'two_pass:shortlist'"),
    ],
)
def test_strategies_that_do_not_exist(word, said):
    with pytest.raises(SettingsError) as error:
        choose_strategies([word])
    assert said in str(error.value)


def test_compactions_in_a_row_keep_the_budget_while_text_arrives(engine, tmp_path):
    several = plan(["two_pass", "streaming_llm"], [4], compactions=[3, 1])
    steps = []
    cells = evaluate(engine, DOCUMENTS[:1], several, tmp_path, steps.append)
    assert [(cell.strategy, cell.compactions) for cell in cells] == [
        (FULL, 1), (NO_CONTEXT, 1), ("two_pass", 1), ("streaming_llm", 1),
        (FULL, 3), ("two_pass", 3), ("streaming_llm", 3),
    ]  # fmt: skip
    assert all(cell.status == "ok" for cell in cells)
    by = {(cell.strategy, cell.compactions): cell for cell in cells}
    assert by["two_pass", 3].held_positions == by["two_pass", 1].held_positions == 20
    arrived = by[FULL, 3].held_positions - by[FULL, 1].held_positions
    assert 100 < arrived <= 256
    assert by[FULL, 3].kl == 0
    # The same by hand, and from the middle: a run that was cut goes on with the same caches.
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "results.jsonl").write_text("".join(lines[:5]))
    assert untimed(evaluate(engine, DOCUMENTS[:1], several, tmp_path / "cut")) == untimed(cells)
    rows = summarise(cells)
    assert [(row.strategy, row.compactions) for row in rows] == [
        (FULL, 1), ("streaming_llm", 1), ("two_pass", 1), (NO_CONTEXT, 1),
        (FULL, 3), ("streaming_llm", 3), ("two_pass", 3),
    ]  # fmt: skip
    with pytest.raises(SettingsError, match="compactions"):
        plan(compactions=[0])


def test_the_report_draws_the_compactions(engine, tmp_path):
    from agentcompact.evaluation.report import write_report

    cells = evaluate(engine, DOCUMENTS[:1], plan(["two_pass", "streaming_llm"], [4], compactions=[1, 2]), tmp_path)
    names = [path.name for path in write_report(cells, tmp_path / "report")]
    assert any(name.endswith("-rounds.png") for name in names)
    assert "compactions" in (tmp_path / "report" / "report.md").read_text()


def test_settings_count_also_where_they_are_defaults(engine, tmp_path):
    """Another version's defaults, or another content of a file, are another cell, told apart in the report."""
    shares = tmp_path / "shares.json"
    word = f"high_attn:budgets=file:budgets_file={shares}"
    kept = []
    for proportions in ([[1, 1], [1, 1]], [[9, 1], [1, 1]]):
        shares.write_text(json.dumps(proportions))
        kept.append(evaluate(engine, DOCUMENTS[:1], plan([word], [4]), tmp_path / "results")[-1].entries_per_head)
    assert kept[0] != kept[1]
    cells, _ = read_results(tmp_path / "results")
    labels = [row.strategy for row in summarise(cells) if row.ratio]
    assert len(labels) == len(set(labels)) == 2
    older = cells[-1].model_copy(update={"settings": {**cells[-1].settings, "ridge": 0.5}})
    assert {label for label in (row.strategy for row in summarise([cells[-1], older])) if "ridge=0.5" in label}


def test_models_are_known_by_their_fingerprints(engine, tmp_path):
    cells = evaluate(engine, DOCUMENTS[:1], plan(["two_pass"], [4]), tmp_path)
    other = [cell.model_copy(update={"fingerprint": "0123456789"}) for cell in cells]
    assert len({row.model for row in summarise([*cells, *other])}) == 2
    renamed = [cell.model_copy(update={"model": "moved"}) for cell in cells[2:]]
    assert {row.model for row in summarise([*cells[:2], *renamed])} == {"moved"}


def test_what_was_measured_is_not_lost(engine, tmp_path):
    """Other metrics are added to those there are, and a failure never takes the place of a success."""
    few = {"strategies": ["two_pass"], "ratios": [2]}
    evaluate(engine, DOCUMENTS[:1], plan(**few, metrics=frozenset({"fidelity"})), tmp_path)
    cells = evaluate(engine, DOCUMENTS[:1], plan(**few, metrics=frozenset({"speed"})), tmp_path)
    assert all(cell.kl is not None for cell in cells)
    assert cells[-1].decode_tokens_per_second > 0
    steps = []
    evaluate(engine, DOCUMENTS[:1], plan(**few, metrics=frozenset({"fidelity", "speed"})), tmp_path, steps.append)
    assert steps == []
    failed = cells[-1].model_copy(update={"status": "failed", "error": "out of memory"})
    assert [row.failed for row in summarise([*cells, failed])] == [0, 0, 0]


def test_a_document_that_is_given_twice_is_measured_once(engine, tmp_path):
    steps = []
    evaluate(engine, [DOCUMENTS[0], DOCUMENTS[0]], plan(["two_pass"], [2]), tmp_path, steps.append)
    assert len(steps) == 3


def test_ids_in_any_script_have_a_file(engine, tmp_path):
    named = DOCUMENTS[0].model_copy(update={"id": "\u6f22" * 90 + "/../x"})
    cells = evaluate(engine, [named], plan(["two_pass"], [2]), tmp_path)
    assert {cell.status for cell in cells} == {"ok"}
    (path,) = (tmp_path / "documents").iterdir()
    assert read_documents(path) == [named]


def test_logits_that_are_no_numbers_fail(tmp_path):
    model = tiny_model("llama")
    model.causal_lm.lm_head.weight.data.fill_(float("nan"))
    cells = evaluate(TransformersEngine(model), DOCUMENTS[:1], plan(["two_pass"], [2]), tmp_path)
    assert {cell.status for cell in cells} == {"failed"}
    assert "not finite here: try another --dtype" in cells[0].error


def test_an_option_without_tokens_is_named(engine, tmp_path):
    odd = Document(
        id="odd",
        context=tiny_text(30),
        questions=(Question(question="w5", options=("w6", " "), label=0),),
    )
    cells = evaluate(engine, [odd], plan(["two_pass"], [2]), tmp_path)
    assert {cell.error for cell in cells} == {"an option of the question 'w5' has no tokens"}


def test_results_that_were_edited_by_hand(engine, tmp_path):
    evaluate(engine, DOCUMENTS[:1], plan(["two_pass"], [2]), tmp_path)
    path = tmp_path / "results.jsonl"
    data = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + data + b"\n")
    assert len(read_results(tmp_path)[0]) == 3
    path.write_bytes(data.replace(b'"ratio":2.0', b'"ratio":0.0'))
    with pytest.raises(DocumentError, match=r"line 3 is no result .*: take that line out"):
        read_results(tmp_path)
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_the_number_of_questions_is_that_of_the_scored_ones(engine, tmp_path):
    mixed = Document(
        id="mixed",
        context=tiny_text(30),
        questions=(
            Question(question="w5", answers=("w6",), kind="a"),
            Question(question="w7", answers=("w6",), kind="a"),
            Question(question="w8", options=("w6", "w9"), label=0, kind="a"),
        ),
    )
    row = summarise(evaluate(engine, [mixed], plan(["two_pass"], [2]), tmp_path))[0]
    assert (row.questions, row.choices) == (2, 1)
    assert (row.kinds["a"].questions, row.kinds["a"].choices) == (2, 1)


def test_the_page_shows_questions_and_answers(engine, tmp_path):
    from agentcompact.evaluation.report import write_report

    cells = evaluate(engine, DOCUMENTS, plan(["two_pass"], [2, 4, 8], metrics=frozenset({"answers"})), tmp_path)
    first = cells[0].questions[0]
    assert (first.question, first.expected) == (DOCUMENTS[0].questions[0].question, ["w5"])
    write_report(cells, tmp_path / "report", plots=False)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "What was answered at 4x: the first 6 questions" in page
    assert first.question in page
    assert "✗" in page
