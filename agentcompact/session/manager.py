"""The memory manager: keeps a conversation's cache within its window by compacting it, and can take that back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentcompact.cache import CompactedCache, PromptFormat
from agentcompact.engines import Engine, Progress
from agentcompact.errors import AgentCompactError, ContextLengthError, InputError, WriteError
from agentcompact.session.compaction import CompactionReport, compact_conversation, context_after
from agentcompact.session.context import BehindSpanError, Context, HeldMessage, Item, Reading
from agentcompact.session.journal import Journal
from agentcompact.session.messages import has_open_call
from agentcompact.session.planning import (
    CompactionPlan,
    Pressure,
    head_length,
    plan_block,
    plan_compaction,
    reserved_for_reply,
)
from agentcompact.session.policy import SessionPolicy
from agentcompact.session.repositioning import moved_down
from agentcompact.session.snapshots import described, keep_snapshot, load_snapshot
from agentcompact.session.state import SessionState, Snapshot
from agentcompact.session.steps import Step, next_step

BeforeCompaction = Callable[[CompactionPlan], "str | bool | None"]
"""May return False to veto a compaction, or a text that it should focus on."""
AfterCompaction = Callable[[CompactionReport], None]


class VetoError(AgentCompactError):
    """A compaction that `before_compaction` did not allow."""


class MemoryManager:
    """Owns a session's cache: what is read into it, when and how it is compacted, and the snapshots to go back to."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        state: SessionState,
        policy: SessionPolicy,
        prompt: PromptFormat,
        before_compaction: BeforeCompaction | None = None,
        after_compaction: AfterCompaction | None = None,
    ) -> None:
        self.engine = engine
        self.journal = journal
        self.state = state
        self.policy = policy
        self.prompt = prompt
        self.before_compaction = before_compaction
        self.after_compaction = after_compaction
        self.paused: str = ""
        """Why automatic compaction waits until the window forces it; "" where it does not."""
        self._paused_at = 0.0
        self.moved = 0
        """By how many positions keys were moved down so far."""
        self._moved_reported = 0
        self.notes: list[str] = []
        """What a person should know of the last reply's memory work."""
        self.context = self._restored(state.latest)
        if state.was_undone:
            self._pause("the last compaction was undone", until_full=True)

    @property
    def cache(self) -> CompactedCache:
        return self.context.cache

    @property
    def window(self) -> int:
        return self.policy.window_of(self.engine.geometry.max_positions)

    def record(self, kind: str, **data: object) -> None:
        """Write an event into the journal and carry it out."""
        self.journal.add(kind, **data)
        self.state.apply(kind, data)

    def fork(self) -> MemoryManager:
        """Return a manager of a copy of the session, which shares its entries and snapshots and goes its own way."""
        state = SessionState(self.state.created, list(self.state.messages), dict(self.state.replies))
        state.pinned, state.compactions = set(self.state.pinned), list(self.state.compactions)
        made = MemoryManager(self.engine, self.journal, state, self.policy, self.prompt)
        made.context, made.moved, made._moved_reported = self.context.fork(), self.moved, self._moved_reported
        made.paused, made._paused_at = self.paused, self._paused_at
        return made

    # Reading

    def read(
        self, items: Sequence[Item], begun: int, wanted: int, progress: Progress | None = None
    ) -> tuple[int, list[CompactionReport]]:
        """Read what of a conversation is not in the cache, compacting before where it must be.

        begun: tokens that begin the reply. wanted: tokens that it may have. Returns the tokens read and the reports of
        compactions. Raises ContextLengthError where it cannot be made to fit; the cache is then as it was.
        """
        self.notes = []
        worked, reports = self.engine.counters.prefilled_tokens, list[CompactionReport]()
        reading = self._settled(items, progress)
        if reading.changed:
            self.notes.append(
                f"the template writes {reading.changed} compacted messages otherwise by now; they stay as they were"
            )
        read = False
        while not read:
            step = self._next_step(items, begun, wanted)
            reports += self._read_step(items[: step.count], step.quiet, begun, wanted, progress)
            read = step.count == len(items)
        return self.engine.counters.prefilled_tokens - worked, reports

    def _next_step(self, items: Sequence[Item], begun: int, wanted: int) -> Step:
        reading, reserve = self.context.reading(items), reserved_for_reply(self.window, wanted)

        def is_due(pending: int, count: int) -> bool:
            due, forced = self._pressed(items[:count], len(reading.closing) + pending + begun, reserve)
            return due or forced

        tokens = [len(ids) for _, ids in reading.new]
        return next_step([item.message for item in items], reading.common, tokens, is_due)

    def _read_step(
        self, items: Sequence[Item], quiet: bool, begun: int, wanted: int, progress: Progress | None
    ) -> list[CompactionReport]:
        """Read one step of a conversation, making room before unless it is quiet."""
        reserve = reserved_for_reply(self.window, wanted)
        reading = self.context.reading(items)
        reports: list[CompactionReport] = []
        if not quiet:
            reports = self._make_room(items, reading, begun, reserve, progress)
            reading = self.context.reading(items)
        if self._over(reading.tokens + (0 if quiet else begun + reserve)):
            return reports + self._read_in_blocks(reading, begun + reserve, progress)
        self.context.read(reading, progress)
        return reports

    def _settled(self, items: Sequence[Item], progress: Progress | None) -> Reading:
        """Go back to the last common message, by an older snapshot where it lies behind a compaction."""
        try:
            return self.context.settle(items, progress)
        except BehindSpanError:
            self._go_back_behind_span(self.context.reading(items).common)
            return self.context.settle(items, progress)

    def _go_back_behind_span(self, count: int) -> None:
        """Restore the newest snapshot that can go back to `count` messages; nothing is held where there is none."""
        while self.state.compactions:
            before = self.state.compactions[-1].before
            self.record("undone")
            if not self.journal.has(before.name):
                continue
            restored = self._restored(before)
            try:
                restored.go_back(min(count, len(restored.held)))
            except BehindSpanError:
                continue
            self.context = restored
            return
        self.record("cleared", count=len(self.state.messages))
        self.context = self._restored(None)

    def _over(self, more: int) -> bool:
        return self.cache.held_positions + more > self.window

    def _make_room(
        self, items: Sequence[Item], reading: Reading, begun: int, reserve: int, progress: Progress | None
    ) -> list[CompactionReport]:
        """Compact before reading where the trigger is reached, or the window would be passed."""
        pending = reading.tokens + begun
        self.context = self._moved_down(self.context, pending + reserve)
        due, forced = self._pressed(items, pending, reserve)
        if due:
            self.paused = ""
        if not self.policy.auto or not (due or forced) or has_open_call([item.message for item in items]):
            return []
        pressure = Pressure(self.window, pending, reserve)
        try:
            report = self._compact_once(items, pressure, progress, forced=forced)
        except AgentCompactError as error:
            if not forced:
                self._pause(str(error))
                return []
            if reading.tokens > self.window // 4:
                return []  # a long message: it is read in blocks
            raise
        if self.cache.held_positions > pressure.most_after(self.policy):
            self._pause(f"the compaction freed {report.held_before - report.held_after:,.0f} positions only")
        return [report]

    def _pressed(self, items: Sequence[Item], pending: int, reserve: int) -> tuple[bool, bool]:
        """Whether so many pending tokens reach the trigger, and whether they and the reply would pass the window."""
        reached = self.cache.held_positions + pending
        waits = self.paused and reached <= self._paused_at + self.policy.margin * self.window
        due = not waits and self.policy.is_triggered(reached, self._live_messages(items), self.window)
        return due, self._over(pending + reserve)

    def _compact_once(
        self, items: Sequence[Item], pressure: Pressure, progress: Progress | None, *, forced: bool
    ) -> CompactionReport:
        plan = self._plan(items, pressure)
        if isinstance(plan, str) and forced:
            pressure = replace(pressure, full=True)
            plan = self._plan(items, pressure)
        if isinstance(plan, str):
            raise ContextLengthError(f"the conversation cannot be compacted further: {plan}")
        return self.compact(plan, pressure=pressure, progress=progress)

    def _plan(self, items: Sequence[Item], pressure: Pressure, *, forced: bool = False) -> CompactionPlan | str:
        messages = [item.message for item in items]
        return plan_compaction(
            messages, self.context.held, self.cache, self.state.pinned, self.policy, pressure, forced=forced
        )

    def _pause(self, why: str, *, until_full: bool = False) -> None:
        """Compact no more by itself until the session has grown by the margin, or only where the window forces it."""
        self.paused, self._paused_at = why, float("inf") if until_full else self.cache.held_positions
        self.notes.append(f"automatic compaction waits: {why}")

    def _live_messages(self, items: Sequence[Item]) -> int:
        border = self.context.compacted_until
        return len(items) - sum(held.stop <= border for held in self.context.held)

    # Compacting

    def compact_now(
        self, items: Sequence[Item], focus: str | None = None, progress: Progress | None = None
    ) -> CompactionReport:
        """Compact what is neither pinned nor kept. Raises InputError where there is nothing to compact."""
        self._settled(items, progress)
        plan = self._plan(items, Pressure(self.window), forced=True)
        if isinstance(plan, str):
            raise InputError(plan)
        return self.compact(plan, focus=focus, progress=progress)

    def compact(
        self,
        plan: CompactionPlan,
        *,
        focus: str | None = None,
        pressure: Pressure | None = None,
        progress: Progress | None = None,
    ) -> CompactionReport:
        """Carry out a plan: the old state stays until the new one is complete and on disk.

        pressure: what an automatic compaction makes room for; None where a person asked.

        Raises VetoError where the callback says no, and what `compact_conversation` raises.
        """
        if self.before_compaction is not None:
            said = self.before_compaction(plan)
            if said is False:
                raise VetoError("the compaction was vetoed by before_compaction")
            focus = said if isinstance(said, str) else focus
        before, held, frozen = self.cache, tuple(self.context.held), self.context.frozen
        before.metadata.prompt = self.prompt
        done = compact_conversation(
            self.engine,
            before,
            plan,
            self.policy,
            focus=focus,
            automatic=pressure is not None,
            most=None if pressure is None else pressure.most_after(self.policy),
            progress=progress,
        )
        more = 0 if pressure is None else pressure.pending + pressure.reply
        context = self._moved_down(context_after(self.engine, done, held, frozen), more)
        done.report.moved, self._moved_reported = self.moved - self._moved_reported, self.moved
        old, new = (self._kept(each, done.report) for each in (self.context, context))
        self.record("compacted", report=done.report.model_dump(mode="json"), before=old.to_json(), after=new.to_json())
        self.context = context
        self.journal.prune(self.policy.snapshot_bytes, {old.name, new.name})
        if self.after_compaction is not None:
            self.after_compaction(done.report)
        return done.report

    def _kept(self, context: Context, report: CompactionReport) -> Snapshot:
        """Write a snapshot; without a file where none is wanted, or it cannot be written, which the report says."""
        if not self.policy.snapshot_bytes:
            return described(context)
        try:
            return keep_snapshot(self.journal, context)
        except WriteError as error:  # a full disk must not end a conversation
            report.warnings.append(f"no snapshot was kept, so this cannot be undone: {error}")
            return described(context)

    def undo(self) -> CompactionReport:
        """Restore the cache before the last compaction, without reading anything; return that compaction's report.

        What was said since is read again with the next reply. Raises InputError where there is nothing to undo, or its
        snapshot was pruned.
        """
        if not self.state.compactions:
            raise InputError("there is no compaction to undo")
        last = self.state.compactions[-1]
        if not self.journal.has(last.before.name):
            raise InputError("the snapshot before the last compaction is gone: raise snapshot_bytes to keep more")
        context = self._restored(last.before, strict=True)
        self.record("undone", by="person")
        self.context = context
        self._pause("the last compaction was undone", until_full=True)
        return last.report

    def _moved_down(self, context: Context, more: int) -> Context:
        """Return the context with what is compacted at lower positions, where those near the model's limit."""
        head = head_length(self.state.messages, self.state.pinned)
        start = context.held[head - 1].stop if 0 < head <= len(context.held) else 0
        moved = moved_down(self.engine, context, start, more)
        if moved is None:
            return context
        gap = context.cache.next_position - moved.cache.next_position
        self.moved += gap
        limit = self.engine.geometry.max_positions
        self.notes.append(f"keys were moved down by {gap:,} positions, since the model's context ends at {limit:,}")
        return moved

    # Long messages

    def _read_in_blocks(self, reading: Reading, reserve: int, progress: Progress | None) -> list[CompactionReport]:
        """Read messages that do not fit the window block by block, compacting each; all or nothing.

        Raises ContextLengthError where even that does not fit.
        """
        if not self.policy.auto:
            raise ContextLengthError(
                f"{reading.tokens:,} new tokens do not fit the window of {self.window:,}, of which "
                f"{self.cache.held_positions:,.0f} are held: compact, or turn automatic compaction on"
            )
        backup = Context(self.engine, self.cache.fork(), self.context.held, self.context.frozen)
        known = len(self.state.compactions)
        reports: list[CompactionReport] = []
        try:
            for item, ids in reading.new:
                reports += self._read_long(item, ids, reserve, progress)
        except BaseException:
            while len(self.state.compactions) > known:
                self.record("undone")
            self.context = backup
            raise
        return reports

    def _read_long(
        self, item: Item, ids: Sequence[int], reserve: int, progress: Progress | None
    ) -> list[CompactionReport]:
        """Read one message, compacting what is there and its own beginning whenever the window is full.

        What is there of it meanwhile is held as a message that equals none, so that snapshots tell what they hold.
        """
        reports: list[CompactionReport] = []
        begin, done = self.cache.next_position, 0
        self.context.held.append(HeldMessage("", "", begin, begin))
        while done < len(ids):
            block = min(self.policy.block, self.window // 4, len(ids) - done)
            if self._over(block + reserve):
                pressure = Pressure(self.window, block, reserve)
                plan = plan_block(
                    self.state.messages, self.context.held, self.cache, self.state.pinned, self.policy, pressure
                )
                if isinstance(plan, str):
                    raise ContextLengthError(
                        f"a message of {len(ids):,} tokens does not fit the window of {self.window:,}: {plan}"
                    )
                reports.append(self.compact(plan, pressure=pressure, progress=progress))
            self.engine.prefill(ids[done : done + block], self.cache, progress=progress)
            self.context.held[-1] = replace(self.context.held[-1], stop=self.cache.next_position)
            done += block
        self.context.held[-1] = replace(self.context.held[-1], key=item.message.key, piece=item.piece)
        return reports

    # Snapshots

    def save(self) -> None:
        """Keep the cache as it is now, so that the session can go on without reading anything again."""
        latest = self.state.latest
        if (
            self.policy.snapshot_bytes
            and self.context.held
            and (latest is None or latest.held != tuple(self.context.held))
        ):
            snapshot = keep_snapshot(self.journal, self.context)
            self.record("saved", snapshot=snapshot.to_json())
            undo = {self.state.compactions[-1].before.name} if self.state.compactions else set()
            self.journal.prune(self.policy.snapshot_bytes, {snapshot.name, *undo})

    def forget(self) -> None:
        """Hold nothing; what the session has is read anew."""
        self.context = self._restored(None)
        self.paused = ""

    def _restored(self, snapshot: Snapshot | None, *, strict: bool = False) -> Context:
        """Return the context of a snapshot; an empty one where there is none, or its file is gone or damaged."""
        context = Context(self.engine)
        if snapshot is not None and self.journal.has(snapshot.name):
            try:
                context = load_snapshot(self.journal, self.engine, snapshot)
            except InputError as error:
                if strict:
                    raise
                self.notes.append(f"a snapshot cannot be used, its messages are read again: {error}")
        context.cache.metadata.prompt = self.prompt
        return context
