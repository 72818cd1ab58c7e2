"""The baseline `cartridge`: the first entries, trained by self-study distillation."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokens

from agentcompact import TransformersEngine
from agentcompact.errors import SettingsError
from agentcompact.queries.self_study import Study, self_study_pairs, self_study_turns
from agentcompact.strategies import CompactionRequest
from agentcompact.strategies.cartridge import Cartridge

SMALL = {"prompts": 6, "answer_tokens": 6, "keep_rollouts": False, "stage2_updates": 20, "stage2_rate": 3e-3}


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
