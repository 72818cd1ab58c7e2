"""Which tokens of a conversation to compact, and into how many entries: counts only, no tensors change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentcompact.cache import CompactedCache
from agentcompact.session.context import HeldMessage
from agentcompact.session.messages import Message, round_start
from agentcompact.session.policy import SMALLEST_REPLY, SessionPolicy

Range = tuple[int, int]


@dataclass(frozen=True)
class CompactionPlan:
    """Ranges of positions to compact and the entries per head of each.

    kept: messages at the end that stay as they are. held_before: held positions of the whole session.
    """

    ranges: list[Range]
    budgets: list[int]
    kept: int
    held_before: float

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def budget(self) -> int:
        return sum(self.budgets)


@dataclass(frozen=True)
class Pressure:
    """What a session must hold beside what it holds: tokens to be read next, and room for the reply.

    full: that the window is kept is enough, where a compaction cannot come below the trigger.
    """

    window: int
    pending: int = 0
    reply: int = 0
    full: bool = False

    def most_after(self, policy: SessionPolicy) -> int:
        """Return the held positions that a compaction must come down to, what is pending not counted."""
        within = self.window - self.pending - self.reply
        if self.full:
            return within
        trigger = policy.trigger_tokens(self.window)
        return min(within, math.floor(trigger - policy.margin * self.window) - self.pending)


def held_in(cache: CompactedCache, start: int, stop: int) -> float:
    """Return the average entries per layer and head that the cache holds for the positions [start, stop)."""
    border = cache.span_tokens
    live = max(0, stop - max(start, border))
    if start >= border or not cache.is_compacted:
        return float(live)
    inside, heads = 0, 0
    for _, layer in cache.full_layers:
        if layer.span is not None:
            positions = layer.span.positions
            inside += int(torch.count_nonzero((positions >= start) & (positions < min(stop, border))))
        heads += cache.geometry.kv_heads
    return live + inside / max(1, heads)


def head_length(messages: Sequence[Message], pinned: set[int]) -> int:
    """Return how many messages at the beginning are never compacted: the system's, and pinned ones behind it."""
    count = 0
    while count < len(messages) and (messages[count].role == "system" or count in pinned):
        count += 1
    return count


def kept_from(
    messages: Sequence[Message], held: Sequence[HeldMessage], policy: SessionPolicy, window: int, fewer: int = 0
) -> int:
    """Return the first message of the end that stays as it is; never inside a tool-call round or a shared piece.

    fewer: how many messages less to keep than the policy says.
    """
    wanted = 0
    for kind, size in policy.keep:
        wanted = max(wanted, _messages_within(kind, size, held, len(messages), window))
    wanted = max(0, wanted - fewer)
    index = round_start(messages, max(0, len(messages) - wanted))
    while 0 < index <= len(held) and held[index - 1].piece == "":
        index -= 1
    return index


def _messages_within(kind: str, size: float, held: Sequence[HeldMessage], total: int, window: int) -> int:
    """Return how many of the last messages a bound keeps: so many, or as many as fit into so many tokens."""
    if kind == "messages":
        return int(size)
    room, count = size * window if kind == "fraction" else size, total - len(held)
    for message in reversed(held):
        room -= message.stop - message.start
        if room < 0:
            break
        count += 1
    return count


def ranges_between(held: Sequence[HeldMessage], pinned: set[int], first: int, last: int) -> list[Range]:
    """Return the positions of messages [first, last) without the pinned ones, neighbours joined.

    A single position between pinned messages is left out: nothing of it can be left out.
    """
    ranges: list[Range] = []
    for index in range(first, min(last, len(held))):
        message = held[index]
        if index in pinned or message.stop == message.start:
            continue
        if ranges and ranges[-1][1] == message.start:
            ranges[-1] = (ranges[-1][0], message.stop)
        else:
            ranges.append((message.start, message.stop))
    return [(start, stop) for start, stop in ranges if stop - start > 1]


def plan_compaction(
    messages: Sequence[Message],
    held: Sequence[HeldMessage],
    cache: CompactedCache,
    pinned: set[int],
    policy: SessionPolicy,
    pressure: Pressure,
    *,
    forced: bool = False,
) -> CompactionPlan | str:
    """Return what to compact so that the session comes below its trigger by the margin, or why that cannot be done.

    forced: a compaction that was asked for, whatever the session holds. Keeps fewer messages than the policy says where
    only that helps, down to none but the pinned ones.
    """
    head = head_length(messages, pinned)
    reason = "there is nothing to compact yet: all of it is pinned or kept"
    seen: set[int] = set()
    for fewer in range(len(messages) + 1):
        last = kept_from(messages, held, policy, pressure.window, fewer)
        if last in seen:
            continue
        seen.add(last)
        ranges = ranges_between(held, pinned, head, last)
        found = _budgeted(ranges, len(messages) - last, cache, policy, pressure, forced)
        if isinstance(found, CompactionPlan):
            return found
        reason = found or reason
        if forced and ranges:
            break
    return reason


def plan_block(
    messages: Sequence[Message],
    held: Sequence[HeldMessage],
    cache: CompactedCache,
    pinned: set[int],
    policy: SessionPolicy,
    pressure: Pressure,
) -> CompactionPlan | str:
    """Plan for a message that is being read in blocks: everything that is not pinned, its own beginning included."""
    ranges = ranges_between(held, pinned, head_length(messages, pinned), len(held))
    found = _budgeted(ranges, 0, cache, policy, pressure, False)
    return found or "nothing of what is held may be compacted"


def _budgeted(
    ranges: list[Range], kept: int, cache: CompactedCache, policy: SessionPolicy, pressure: Pressure, forced: bool
) -> CompactionPlan | str:
    """Give ranges their budgets; say why where they cannot be met, or nothing where there are none."""
    tokens = sum(stop - start for start, stop in ranges)
    if not ranges or (tokens < policy.min_span and not forced):
        return f"only {tokens:,} tokens could be compacted, and min_span is {policy.min_span:,}" if ranges else ""
    holding = [held_in(cache, start, stop) for start, stop in ranges]
    held, total = cache.held_positions, sum(holding)
    least = sum(max(1, math.ceil((stop - start) / policy.highest_ratio)) for start, stop in ranges)
    wanted = min(math.ceil(tokens / policy.ratio), math.floor(policy.target * pressure.window))
    if not forced:
        margin = policy.margin * pressure.window
        wanted = min(wanted, pressure.most_after(policy) - math.ceil(held - total), math.floor(total - margin))
    if wanted < least:
        return (
            f"compacting {tokens:,} tokens to {max(0, wanted):,} entries per head would pass max_ratio "
            f"{policy.highest_ratio:g}"
        )
    if wanted >= total:
        return (
            f"the {tokens:,} tokens hold {total:,.0f} entries per head already, which ratio {policy.ratio:g} does not "
            "bring down: give a higher ratio"
        )
    budgets = [max(1, math.floor(wanted * each / total)) for each in holding]
    return CompactionPlan(ranges, budgets, kept, held)


def reply_room(window: int, held: float, pending: int, wanted: int) -> int:
    """Return how many tokens a reply may have within the window."""
    return max(0, min(wanted, window - math.ceil(held) - pending))


def reserved_for_reply(window: int, wanted: int) -> int:
    """Return the tokens that must be free before a reply: what it may take, a quarter of the window at most."""
    return max(SMALLEST_REPLY, min(wanted, window // 4))
