"""The strategy `ttt`: selection under the budget, gradients, batches, what each setting does, and its report."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model, tiny_text, tiny_tokens
from transformers.models.llama import modeling_llama

from agentcompact import TransformersEngine, answer, compact, recompact, wrap_model
from agentcompact.cache import CompactedCache, Span
from agentcompact.errors import ContextLengthError, MemoryLimitError, SettingsError
from agentcompact.fitting.attention_statistics import attention_statistics
from agentcompact.queries.rollouts import greedy_answers, teacher_rollouts
from agentcompact.strategies import CompactionRequest
from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.base import Phases
from agentcompact.strategies.kvzip import KVzip
from agentcompact.strategies.kvzip_plus import KVzipPlus
from agentcompact.strategies.latent_training import Training
from agentcompact.strategies.ttt import LatentCompaction, reconstruction_scores

SMALL = {"prompts": 10, "answer_tokens": 6, "keep_rollouts": False, "stage1_updates": 30, "stage2_updates": 6}
INIT = {**SMALL, "stage1_updates": 0, "stage2_updates": 0}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTCOMPACT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(tiny_model("llama"))


def double_engine(kind="llama"):
    loaded = tiny_model(kind)
    return TransformersEngine(wrap_model(loaded.causal_lm.double(), loaded.tokenizer, name=f"double-{kind}"))


def compacted(engine, tokens=60, budget=12, start=0, stop=None, **settings):
    cache = engine.prefill(tiny_tokens(tokens))
    method = LatentCompaction(**{**SMALL, **settings})
    return cache, method.compact(CompactionRequest(engine, cache, budget, start=start, stop=stop))


def spans(cache):
    return [layer.span for _, layer in cache.full_layers]


def training(engine, tokens=40, budget=8, double=False, **settings):
    """Return a training over a selection that is not trained yet."""
    cache = engine.prefill(tiny_tokens(tokens))
    request = CompactionRequest(engine, cache, budget)
    method = LatentCompaction(**{**SMALL, **settings})
    prompts = [tiny_tokens(length, seed=length) for length in (4, 9, 6, 5, 3, 7)]
    rollouts = teacher_rollouts(engine, cache, greedy_answers(engine, cache, prompts, 5, 3))
    full = [cache.source(index, 0, tokens) for index, _ in cache.full_layers]
    chosen, frozen = method.select(request, full, rollouts, reconstruction_scores(request, full))
    if double:
        chosen = [Span(s.keys.double(), s.values.double(), s.bias.double(), s.positions, s.offsets) for s in chosen]
    place = SimpleNamespace(stage="stage 1", losses={"stage 1": [], "stage 2": []})
    state = SimpleNamespace(spans=chosen, frozen=frozen, place=place, moments={})
    return Training(request, method.settings, rollouts, full, state, Phases(), lambda: None)


def test_selection_meets_the_budget_with_three_kinds_of_entries(engine):
    job = training(engine, tokens=40, budget=8)
    both, anchors, heads = 2, 1, 2
    geometry = engine.geometry
    assert sum(span.entries for span in job.state.spans) == 8 * heads * len(job.full)
    assert sum(int(held.sum()) for held in job.state.frozen) == (8 - both) * heads * len(job.full)
    scores = reconstruction_scores(job.request, job.full)
    kept = []
    for place, (span, held) in enumerate(zip(job.state.spans, job.state.frozen, strict=True)):
        queries = job.rollouts.queries[geometry.full_layers[place]].view(heads, -1, geometry.head_dim)
        for head, (keys, values, bias, positions) in enumerate(span):
            source = job.full[place].head(head)
            rows = positions.long()
            assert torch.equal(keys, source[0][rows])
            assert torch.equal(values, source[1][rows])
            assert not bias.any()
            fixed = held[span.offsets[head] : span.offsets[head + 1]]
            others = rows[~fixed].tolist()
            assert others[0] == 0  # the first entry counts as the anchor
            assert len(others) == both
            reference = source[0][0]
            open_rows = [row for row in range(40) if row not in rows[fixed].tolist() and row != 0]
            far = max(open_rows, key=lambda row: float((source[0][row] - reference).square().sum()))
            assert others[1] == far
            kept += [float(score) for score in scores[place][head][rows[fixed]]]
            read = attention_statistics(queries[head : head + 1], source[0][None], source[2][None], geometry.scaling)
            assert read.score.shape == (1, 40)
    everything = torch.cat([head[1:] for layer in scores for head in layer])
    assert sorted(kept, reverse=True) == pytest.approx(everything.topk(len(kept)).values.tolist())
    assert anchors == 1


def test_gradient_of_the_entries_is_that_of_finite_differences(monkeypatch):
    def norm(self, states):  # transformers' own rounds to float32 in between
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    job = training(double_engine(), double=True)
    leaves = job.trainable_spans()
    items = job.rollouts.items[:3]
    parts = [[span.keys, span.values, span.bias] for span in leaves]
    gradients = torch.autograd.grad(job.stage2_loss(leaves, items), [leaf for part in parts for leaf in part])
    step, checked = 1e-5, 0
    for number, leaf in enumerate(leaf for part in parts for leaf in part):
        flat = leaf.detach().view(-1)
        for place in (0, flat.numel() // 2, flat.numel() - 1):
            known = float(flat[place])
            losses = []
            for sign in (1, -1):
                flat[place] = known + sign * step
                with torch.no_grad():
                    losses.append(float(job.stage2_loss(leaves, items)))
            flat[place] = known
            measured = (losses[0] - losses[1]) / (2 * step)
            assert float(gradients[number].view(-1)[place]) == pytest.approx(measured, rel=1e-4, abs=1e-7)
            checked += abs(measured) > 1e-6
    assert checked > 6


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("full_vocabulary", [False, True])
def test_a_padded_batch_is_its_rollouts_one_by_one(kind, full_vocabulary):
    job = training(double_engine(kind), double=True, full_vocabulary=full_vocabulary)
    items = job.rollouts.items[:4]
    assert len({len(item.prompt) for item in items}) == 4
    leaves = job.trainable_spans()
    wanted = [leaf for span in leaves for leaf in (span.keys, span.values, span.bias)]
    together = job.stage2_loss(leaves, items)
    joint = torch.autograd.grad(together, wanted)
    apart = [job.stage2_loss(leaves, [item]) for item in items]
    single = torch.autograd.grad(torch.stack(apart).mean(), wanted)
    assert float(together.detach()) == pytest.approx(float(torch.stack(apart).detach().mean()), rel=1e-9)
    for a, b in zip(joint, single, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_model_weights_stay_without_gradients(engine):
    before = {name: parameter.clone() for name, parameter in engine.model.causal_lm.named_parameters()}
    compacted(engine)
    for name, parameter in engine.model.causal_lm.named_parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad
        assert torch.equal(parameter, before[name])


def test_stage1_leaves_preservers_alone_and_stage2_does_not(engine):
    full, result = compacted(engine, stage2_updates=0)
    old = [full.source(index, 0, 60) for index, _ in full.full_layers]
    same = changed = 0
    for before, after in zip(old, spans(result.cache), strict=True):
        for source, (keys, values, bias, positions) in zip(before, after, strict=True):
            alike = (keys == source[0][positions.long()]).all(dim=1) & (values == source[1][positions.long()]).all(
                dim=1
            )
            same, changed = same + int(alike.sum()), changed + int((~alike).sum())
            assert not bias[alike].any()
    assert (same, changed) == (9 * 4, 3 * 4)
    _, trained = compacted(engine, stage1_updates=0)
    assert not any(
        torch.equal(span.keys[row], before.head(head)[0][int(position)])
        for before, span in zip(old, spans(trained.cache), strict=True)
        for head in range(span.heads)
        for row, position in zip(range(*span.offsets[head : head + 2]), span.head(head)[3], strict=True)
    )


def held_out(engine, full, small, seed=50):
    """Grouped divergence and attention error of prompts that were not trained on: (divergence, output error)."""
    prompts = [tiny_tokens(6, seed=seed + number) for number in range(8)]
    made = greedy_answers(engine, full, prompts, 6, 8)
    turns = [(each.prompt, each.tokens) for each in made if each.tokens]
    teacher, student = engine.forced_logits(full, turns), engine.forced_logits(small, turns)
    pairs = zip(teacher, student, strict=True)
    kl = torch.cat([(a.softmax(1) * (a.log_softmax(1) - b.log_softmax(1))).sum(1) for a, b in pairs]).mean()
    queries = teacher_rollouts(engine, full, made).queries
    errors = []
    for place, (index, _) in enumerate(full.full_layers):
        source, kept = full.source(index, 0, full.next_position), spans(small)[place]
        pooled = queries[index].view(source.heads, -1, engine.geometry.head_dim)
        for head in range(source.heads):
            outputs = []
            for keys, values, bias, _ in (source.head(head), kept.head(head)):
                scores = pooled[head] @ keys.T * engine.geometry.scaling + bias
                outputs.append(scores.softmax(1) @ values)
            errors.append((outputs[0] - outputs[1]).square().mean() / outputs[0].var())
    return float(kl), float(torch.stack(errors).mean())


def test_both_losses_fall_and_so_do_held_out_ones(engine):
    settings = {"prompts": 60, "stage2_rate": 3e-3}
    full, selected = compacted(engine, stage1_updates=0, stage2_updates=0, **settings)
    _, fitted = compacted(engine, stage1_updates=300, stage2_updates=0, **settings)
    _, trained = compacted(engine, stage1_updates=300, stage2_updates=60, **settings)
    errors = [held_out(engine, full, each.cache) for each in (selected, fitted, trained)]
    assert errors[1][1] < 0.9 * errors[0][1]
    assert errors[2][0] < 0.95 * errors[1][0]
    losses = trained.report.training["losses"]
    assert sum(losses["stage 1"][-20:]) < 0.9 * sum(losses["stage 1"][:20])
    assert sum(losses["stage 2"][-10:]) < sum(losses["stage 2"][:10])


def test_report_says_what_was_done(engine):
    told = []
    cache = engine.prefill(tiny_tokens(60))
    request = CompactionRequest(engine, cache, 12, progress=lambda *facts: told.append(facts))
    report = LatentCompaction(**SMALL).compact(request).report
    facts = report.training
    assert report.entries_after == 12 * 4
    assert set(report.seconds) == {
        "requests",
        "rollouts",
        "scores",
        "selection",
        "estimate",
        "stage 1",
        "stage 2",
        "total",
    }
    assert (facts["prompts"], facts["stage1_updates"], facts["stage2_updates"]) == (10, 30, 6)
    assert [len(facts["losses"][stage]) for stage in ("stage 1", "stage 2")] == [30, 6]
    each = facts["seconds_per_update"]
    assert facts["paper_seconds_of_updates"] == pytest.approx(1000 * (each["stage 1"] + each["stage 2"]))
    assert facts["process_peak_bytes"] > 0
    assert report.compaction_tokens > 0
    assert report.settings["stage1_rate"] == 3e-3
    phases = [phase for phase, _, _ in told]
    assert any("the paper's schedule" in phase for phase in phases)
    assert sum(phase.startswith("stage 1 · loss ") for phase in phases) == 30 * 2
    assert [done for phase, done, _ in told if phase.startswith("stage 2 · ")] == list(range(1, 7))
    assert phases[-1].endswith("0 s left")


def test_same_seed_same_cache_and_another_seed_another(engine):
    cache = engine.prefill(tiny_tokens(60))

    def keys(seed):
        made = LatentCompaction(**SMALL).compact(CompactionRequest(engine, cache, 12, seed=seed)).cache
        return torch.cat([span.keys.flatten() for span in spans(made)])

    first = keys(0)
    assert torch.equal(first, keys(0))
    assert not torch.equal(first, keys(1))


@pytest.mark.parametrize(
    "settings",
    [
        {"initialiser": "anchors"},
        {"initialiser": "diversifiers"},
        {"initialiser": "random"},
        {"initialiser": "recent"},
        {"preserver_share": 0.0},
        {"preserver_share": 1.0},
        {"match_mass": False},
        {"train_preservers": True},
        {"freeze_first": True},
        {"full_vocabulary": True, "cross_entropy": False},
    ],
)
def test_every_ablation_runs_within_the_budget(engine, settings):
    _, plain = compacted(engine, budget=24)
    _, result = compacted(engine, budget=24, **settings)
    assert result.report.entries_after == 24 * 4
    assert not torch.equal(
        torch.cat([span.keys.sum(dim=1) for span in spans(plain.cache)]),
        torch.cat([span.keys.sum(dim=1) for span in spans(result.cache)]),
    )


def test_without_biases_they_stay_zero(engine):
    _, result = compacted(engine, biases=False)
    assert not any(span.bias.any() for span in spans(result.cache))
    _, result = compacted(engine)
    assert all(span.bias.any() for span in spans(result.cache))


def test_frozen_first_entry_is_as_it_was(engine):
    full, result = compacted(engine, stage2_updates=0, freeze_first=True)
    for (index, _), span in zip(full.full_layers, spans(result.cache), strict=True):
        for head, (keys, _, bias, positions) in enumerate(span):
            assert int(positions[0]) == 0
            assert torch.equal(keys[0], full.source(index, 0, 1).head(head)[0][0])
            assert not bias[0]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_span_inside_the_text_and_again(kind):
    engine = TransformersEngine(tiny_model(kind))
    full, result = compacted(engine, tokens=70, budget=8, start=10, stop=50)
    made = result.cache
    assert made.next_position == 70
    for index, layer in made.full_layers:
        assert layer.length == 20
        assert torch.equal(made.source(index, 0, 10).keys, full.source(index, 0, 10).keys)
    assert result.report.entries_after == 8 * 2 * len(spans(made))
    again = recompact(engine, made, LatentCompaction(**SMALL), budget=4)
    assert again.metadata.reports[-1].entries_after == 4 * 2 * len(spans(made))
    assert all(torch.isfinite(span.keys).all() for span in spans(again))


def test_saved_in_the_models_dtype(tmp_path):
    loaded = tiny_model("llama")
    half = wrap_model(loaded.causal_lm.to(torch.bfloat16), loaded.tokenizer, name="half")
    engine = TransformersEngine(half)
    cache = compact(engine, tiny_text(60), LatentCompaction(**SMALL), ratio=4)
    assert all(span.keys.dtype == span.values.dtype == torch.bfloat16 for span in spans(cache))
    assert all(span.bias.dtype == torch.float32 for span in spans(cache))
    path = cache.save(tmp_path / "half.kv")
    again = CompactedCache.load(path, half)
    asked = [answer(engine, each, "w5 w6", max_new_tokens=5)[0].token_ids for each in (cache, again)]
    assert asked[0] == asked[1]
    assert again.metadata.reports[-1].training["prompts"] == 10


def test_rollouts_are_reused_for_other_ratios(engine):
    cache = engine.prefill(tiny_tokens(60))
    method = LatentCompaction(**{**INIT, "keep_rollouts": True})
    engine.counters.decoded_tokens, tokens = 0, []
    for budget in (12, 6):
        tokens.append(method.compact(CompactionRequest(engine, cache, budget)).report.compaction_tokens)
    assert tokens[1] < tokens[0] / 2
    fresh = LatentCompaction(**INIT).compact(CompactionRequest(engine, cache, 6)).cache
    kept = method.compact(CompactionRequest(engine, cache, 6)).cache
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(spans(fresh), spans(kept), strict=True))


def test_interrupted_rollouts_go_on_where_they_were(engine, tmp_path):
    cache = engine.prefill(tiny_tokens(60))
    method = LatentCompaction(**{**INIT, "keep_rollouts": True, "rollout_batch": 4})

    def stop(phase, done, total):
        if phase.startswith("rollouts") and done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.compact(CompactionRequest(engine, cache, 6, progress=stop))
    told = []
    method.compact(CompactionRequest(engine, cache, 6, progress=lambda *facts: told.append(facts)))
    assert [done for phase, done, _ in told if phase.startswith("rollouts")] == [10]


def test_presets_are_schedules():
    assert LatentCompaction().settings.schedule == LatentCompaction(preset="paper").settings.schedule
    paper, fast, init = (LatentCompaction(preset=name).settings.schedule for name in ("paper", "fast", "init"))
    assert (paper.prompts, paper.stage1_updates, paper.stage2_updates) == (None, 1000, 1000)
    assert (init.stage1_updates, init.stage2_updates) == (0, 0)
    assert 0 < fast.stage1_updates < 1000
    assert LatentCompaction(preset="fast", stage2_updates=7).settings.schedule.stage2_updates == 7
    with pytest.raises(SettingsError, match="preset"):
        LatentCompaction(preset="slow")
    with pytest.raises(SettingsError, match="did you mean 'stage1_updates'"):
        LatentCompaction(stage1_update=3)


def test_a_bank_of_ones_own_is_asked(engine, tmp_path):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps({"requests": ["w9 w10", "w11"], "instructions": ["w12"]}))
    _, result = compacted(engine, prompts_file=str(path), prompts=None)
    assert result.report.training["prompts"] == 2
    with pytest.raises(SettingsError, match="No such file"):
        compacted(engine, prompts_file=str(tmp_path / "none.json"))


def test_what_does_not_fit_is_refused_before_any_work(engine):
    cache = engine.prefill(tiny_tokens(60))
    worked = engine.counters.compaction_tokens
    with pytest.raises(MemoryLimitError, match=r"needs about .* GiB .* stage 2 .* 0.0 GiB are free"):
        LatentCompaction(**SMALL, memory_gib=1e-4).compact(CompactionRequest(engine, cache, 12))
    long = engine.prefill(tiny_tokens(505))
    with pytest.raises(ContextLengthError, match="do not fit"):
        LatentCompaction(**SMALL).compact(CompactionRequest(engine, long, 12))
    assert engine.counters.compaction_tokens == worked


def test_a_budget_for_everything_compacts_nothing(engine):
    _, result = compacted(engine, tokens=20, budget=20)
    assert "nothing was compacted" in result.report.warnings[0]


@pytest.mark.parametrize("budget", [1, 2, 3, 59])
def test_extreme_budgets(engine, budget):
    _, result = compacted(engine, budget=budget, stage1_updates=3, stage2_updates=2)
    assert result.report.entries_after == budget * 4
    assert all(torch.isfinite(span.values).all() for span in spans(result.cache))


def test_recitations_have_their_share_of_training(engine):
    _, made = compacted(engine, recitation=0.5, stage2_updates=20)
    facts = made.report.training
    assert (facts["prompts"], facts["recitations"]) == (10, 1)
    assert sum(facts["losses"]["stage 1"][-10:]) < sum(facts["losses"]["stage 1"][:10])
    _, alone = compacted(engine, recitation=1.0)
    _, plain = compacted(engine, recitation=0.0)
    kept = [torch.cat([span.keys for span in spans(each.cache)]) for each in (made, alone, plain)]
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])


def test_preservers_by_the_score_that_was_asked_for(engine):
    full, made = compacted(engine, stage1_updates=0, stage2_updates=0, preserver_score="kvzip")
    request = CompactionRequest(engine, full, 12)
    source = [full.source(index, 0, 60) for index, _ in full.full_layers]
    best = {}
    for scorer in (KVzip(), KVzipPlus()):
        scores = reconstruction_scores(request, source, scorer)
        ranked = sorted(
            ((float(score), layer, head, row + 1) for layer, heads in enumerate(scores)
             for head, each in enumerate(heads) for row, score in enumerate(each[1:])), reverse=True,
        )  # fmt: skip
        best[scorer.name] = {(layer, head, row) for _, layer, head, row in ranked[:36]}
    kept = {
        (layer, head, int(position))
        for layer, span in enumerate(spans(made.cache))
        for head, (*_, positions) in enumerate(span)
        for position in positions
    }
    assert best["kvzip"] <= kept
    assert not best["kvzip_plus"] <= kept


def test_training_may_begin_with_the_entries_of_attention_matching(engine):
    full, begun = compacted(engine, stage1_updates=0, stage2_updates=0, initialiser="attention_matching")
    matched = AttentionMatching().compact(CompactionRequest(engine, full, 12)).cache
    for a, b in zip(spans(begun.cache), spans(matched), strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.bias, b.bias)
        assert torch.equal(a.positions, b.positions)
    _, trained = compacted(engine, stage1_updates=300, initialiser="attention_matching", recitation=0.5)
    assert held_out(engine, full, trained.cache)[1] < held_out(engine, full, begun.cache)[1]


def test_what_is_set_goes_over_the_preset():
    paper, fast = LatentCompaction().settings.schedule, LatentCompaction(preset="fast").settings.schedule
    assert (paper.prompts, paper.stage1_updates, paper.stage2_updates, paper.stage2_rate) == (None, 1000, 1000, 1e-4)
    assert (paper.recitation, paper.initialiser) == (0.0, "mix")
    assert (fast.recitation, fast.initialiser, fast.stage2_rate) == (0.5, "attention_matching", 1e-3)
    mine = LatentCompaction(preset="fast", recitation=0.0, initialiser="mix", stage2_rate=1e-4, prompts=7)
    assert (mine.settings.schedule.recitation, mine.settings.schedule.initialiser) == (0.0, "mix")
    assert (mine.settings.schedule.stage2_rate, mine.settings.schedule.prompts) == (1e-4, 7)
    assert mine.settings.schedule.stage1_updates == fast.stage1_updates
