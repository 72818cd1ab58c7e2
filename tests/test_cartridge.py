"""The baseline `cartridge`: the first entries, trained by self-study distillation."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens

from agentcompact import TransformersEngine, compact, register_strategy
from agentcompact.errors import SettingsError
from agentcompact.evaluation import Document, Question, choose_strategies
from agentcompact.evaluation.document_run import DocumentRun
from agentcompact.evaluation.report import write_report
from agentcompact.queries.self_study import Study, self_study_pairs, self_study_turns
from agentcompact.strategies import CompactionRequest, registry
from agentcompact.strategies.cartridge import Cartridge
from agentcompact.strategies.trained import curve
from agentcompact.strategies.ttt import LatentCompaction

SMALL = {"prompts": 6, "answer_tokens": 6, "keep_rollouts": False, "stage2_updates": 20, "stage2_rate": 3e-3}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"))


def compacted(engine, budget=10, **settings):
    cache = engine.prefill(tiny_tokens(60))
    return cache, Cartridge(**{**SMALL, **settings}).compact(CompactionRequest(engine, cache, budget))


def test_it_begins_as_the_first_entries(engine):
    full, result = compacted(engine, stage2_updates=0)
    for index, layer in result.cache.full_layers:
        first = full.source(index, 0, 10)
        assert layer.span.offsets == first.offsets
        assert torch.equal(layer.span.keys, first.keys)
        assert torch.equal(layer.span.values, first.values)


def test_training_lowers_the_loss_and_leaves_biases_and_positions(engine):
    full, result = compacted(engine)
    losses = result.report.training["losses"]
    assert set(losses) == {"stage 2"}
    assert sum(losses["stage 2"][-5:]) < sum(losses["stage 2"][:5])
    for index, layer in result.cache.full_layers:
        first = full.source(index, 0, 10)
        assert not torch.equal(layer.span.keys, first.keys)
        assert torch.equal(layer.span.positions, first.positions)
        assert not layer.span.bias.any()
    assert set(result.report.training["seconds_per_update"]) == {"stage 2"}


def test_it_asks_what_self_study_asks(engine):
    cache, result = compacted(engine, stage2_updates=1)
    study = Study(6, 6)
    pairs = self_study_pairs(engine, cache, 0, None, study)
    assert result.report.training["prompts"] == len(pairs) > 6
    assert [[*prompt, *reply] for prompt, reply in pairs] == self_study_turns(engine, cache, 0, None, study)


def test_it_has_no_settings_of_stage_1():
    with pytest.raises(SettingsError, match="no setting 'stage1_updates'"):
        Cartridge(stage1_updates=3)


@pytest.fixture
def registered(monkeypatch):
    """Both by name, also where the package was installed before they were there."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_strategy(LatentCompaction)
    register_strategy(Cartridge)


def test_losses_are_a_figure_of_the_evaluations_report(engine, registered, tmp_path):
    question = Question(question="w5 w6", answers=("w7",), max_new_tokens=4)
    documents = [Document(id=f"d{n}", task="own", context=tiny_text(60, seed=n), questions=(question,)) for n in (1, 2)]
    ttt = {**SMALL, "stage1_updates": 10, "prompts": 6}
    words = [
        ":".join([name, *(f"{key}={json.dumps(value)}" for key, value in settings.items())])
        for name, settings in (("ttt", ttt), ("cartridge", SMALL))
    ]
    cells = [
        DocumentRun(engine, document, frozenset({"accuracy"}), 0).measure(choice.label, 6.0, choice)
        for document in documents
        for choice in choose_strategies(words)
    ]
    assert [cell.status for cell in cells] == ["ok"] * 4, [cell.error for cell in cells]
    assert set(cells[0].training["losses"]) == {"stage 1", "stage 2"}
    paths = write_report(cells, tmp_path / "report")
    (picture,) = [path for path in paths if path.name.endswith("-losses.png")]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Losses of training" in (tmp_path / "report" / "report.html").read_text()
    plain = [cell.model_copy(update={"training": {}}) for cell in cells]
    assert not [path for path in write_report(plain, tmp_path / "other") if "losses" in path.name]


def test_eval_of_all_strategies_leaves_out_those_that_train(registered):
    labels = [choice.label for choice in choose_strategies(["all"])]
    assert "kvzip" in labels
    assert not {"ttt", "cartridge", "fast_diamond"} & set(labels)
    assert [choice.label for choice in choose_strategies(["ttt:preset=init"])] == ["ttt:preset=init"]


def test_curves_are_short():
    assert curve([1.0, 2.0]) == [1.0, 2.0]
    assert curve([float(number) for number in range(1000)])[:2] == [2.0, 7.0]
    assert len(curve([0.5] * 1000)) == 200


def test_in_blocks_each_has_its_own_training(engine):
    made = compact(engine, tiny_text(64), Cartridge(**SMALL), ratio=4, block=32)
    facts = made.metadata.reports[-1].training
    assert [len(each["losses"]["stage 2"]) for each in facts["blocks"]] == [20, 20]
    assert facts["losses"] == {}
    assert made.held_positions == 16
