"""ttt: entries that are trained for one document, first layer by layer, then by the model's predictions.

Source: Latent Compaction with Test-Time Training (Shen, Xiao and Han 2026).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentcompact.cache import Report, Span
from agentcompact.engines import question_ids
from agentcompact.fitting.attention_statistics import attention_statistics
from agentcompact.fitting.latent_selection import other_rows, preserver_rows, slot_counts
from agentcompact.queries.rollout_prompts import read_prompt_bank
from agentcompact.queries.rollouts import Rollouts
from agentcompact.strategies.attention_matching import AttentionMatching
from agentcompact.strategies.base import CompactionRequest, Phases
from agentcompact.strategies.kvzip import KVzip
from agentcompact.strategies.kvzip_plus import KVzipPlus
from agentcompact.strategies.latent_settings import LatentSettings
from agentcompact.strategies.trained import TrainedCompaction


class LatentCompaction(TrainedCompaction):
    """Preservers, anchors and diversifiers of the full cache, trained in two stages with the model frozen.

    Preservers are the entries that KVzip+ ranks highest over all layers and heads; anchors get the most attention from
    teacher rollouts, diversifiers lie farthest from those. Stage 1 fits anchors and diversifiers of each layer to the
    attention outputs and log-normalizers of all entries; stage 2 trains everything by the full cache's predictions.
    Meant for a document that is compacted once and asked often: it costs many times the prefill.
    """

    name = "ttt"
    summary = "trained for one document: attention fitting, then distillation; slow, for caches that are asked often"
    settings_type = LatentSettings
    settings: LatentSettings
    needs = TrainedCompaction.needs | KVzipPlus.needs

    def requests(self, request: CompactionRequest) -> list[list[int]]:
        texts = read_prompt_bank(self.settings.prompts_file).prompts(self.settings.schedule.prompts, request.focus)
        return [question_ids(request.engine, request.cache.metadata.prompt, text) for text in texts]

    def selection(
        self, request: CompactionRequest, spans: Sequence[Span], rollouts: Rollouts, phases: Phases, report: Report
    ) -> tuple[list[Span], list[Tensor]]:
        if self.settings.schedule.initialiser == "attention_matching":
            return matched_entries(request, spans, phases, report)
        with phases.phase("scores"):
            scorer = KVzipPlus() if self.settings.preserver_score == "kvzip_plus" else KVzip()
            scores = reconstruction_scores(request, spans, scorer) if self.settings.preserver_share > 0 else None
        with phases.phase("selection"):
            return self.select(request, spans, rollouts, scores)

    def select(
        self,
        request: CompactionRequest,
        spans: Sequence[Span],
        rollouts: Rollouts,
        scores: Sequence[Sequence[Tensor]] | None,
    ) -> tuple[list[Span], list[Tensor]]:
        """Return the chosen entries of each layer in float32, and which of them are preservers (entries,) bool.

        scores: KVzip+ scores per layer and head (n,), or None where there are no preservers.
        """
        settings = self.settings
        both, anchors = slot_counts(request.budget, settings.preserver_share, settings.anchor_share)
        free = [[min(both, n) for n in span.lengths] for span in spans]
        total = request.budget * sum(span.heads for span in spans) - sum(map(sum, free))
        known = scores or [[span.bias.new_zeros(n) for n in span.lengths] for span in spans]
        sparing = settings.schedule.initialiser not in ("random", "recent")
        preservers = preserver_rows(known, total, free, spare_first=sparing)
        chosen, frozen = [], []
        for place, (index, _) in enumerate(request.cache.full_layers):
            span, heads, held = spans[place], [], []
            attention = self._attention(request, span, rollouts.queries[index].to(span.keys.device))
            for head, (keys, values, bias, positions) in enumerate(span):
                taken = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
                taken[preservers[place][head].to(keys.device)] = True
                generator = torch.Generator().manual_seed((request.seed * 1_000_003 + index * 1009 + head) % 2**63)
                counts = (free[place][head], min(anchors, free[place][head]))
                others = other_rows(settings.schedule.initialiser, keys, attention[head], taken, counts, generator)
                rows = torch.cat([torch.nonzero(taken)[:, 0], others]).sort().values
                kept = taken.clone()
                kept[:1] |= settings.freeze_first
                heads.append((keys[rows].float(), values[rows].float(), bias[rows], positions[rows]))
                held.append(kept[rows] & (not settings.train_preservers))
            chosen.append(Span.from_heads(heads))
            frozen.append(torch.cat(held))
        return chosen, frozen

    def _attention(self, request: CompactionRequest, span: Span, queries: Tensor) -> list[Tensor | None]:
        """Return the highest softmax weight of each entry over the teacher's queries, per head (n,); equation 6."""
        if self.settings.schedule.initialiser not in ("mix", "anchors"):
            return [None] * span.heads
        geometry = request.engine.geometry
        pooled = queries.reshape(span.heads, -1, geometry.head_dim)
        found: list[Tensor | None] = []
        for head, (keys, _, bias, _) in enumerate(span):
            if not len(keys):
                found.append(bias)
                continue
            read = (pooled[head : head + 1], keys[None], bias[None])
            found.append(attention_statistics(*read, geometry.scaling, score="max", with_mass=False).score[0])
        return found


def matched_entries(
    request: CompactionRequest, spans: Sequence[Span], phases: Phases, report: Report
) -> tuple[list[Span], list[Tensor]]:
    """Return the entries of `attention_matching` in float32, none of them frozen."""
    matched = AttentionMatching().compact_spans(request, spans, phases, report)
    chosen = [Span(s.keys.float(), s.values.float(), s.bias.float(), s.positions, s.offsets) for s in matched]
    return chosen, [torch.zeros(span.entries, dtype=torch.bool, device=span.keys.device) for span in chosen]


def reconstruction_scores(
    request: CompactionRequest, spans: Sequence[Span], scorer: KVzip | None = None
) -> list[list[Tensor]]:
    """Return the scores of all entries, by KVzip+ or another of its kind: per layer and head (n,)."""
    scorer = scorer or KVzipPlus()
    captured = scorer.find_queries(request)
    scores = []
    for place, (index, _) in enumerate(request.cache.full_layers):
        scores.append(scorer.score_layer(request, index, spans[place], captured))
        if request.progress is not None:
            request.progress("scores", place + 1, len(spans))
    return scores
