"""One call of the model: find what is held of the conversation, read the rest, decode, and hold the reply."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.exceptions import ContextOverflowError

from agentcompact.engines import TokenConstraint
from agentcompact.errors import AgentCompactError, CapabilityError, ContextLengthError, SettingsError
from agentcompact.session.compaction import CompactionReport
from agentcompact.session.context import Context, Item, ReplyTokens
from agentcompact.session.manager import MemoryManager
from agentcompact.session.messages import Message, ToolCall
from agentcompact.session.planning import reply_room
from agentcompact.session.policy import SMALLEST_REPLY, SessionPolicy
from agentcompact.session.rendering import Rendered
from agentcompact.session.replying import OnText, decode_reply
from agentcompact.settings import SamplingSettings
from langchain_agentcompact.plain_reply import PlainReply
from langchain_agentcompact.registry import SharedModel
from langchain_agentcompact.snapshots import SnapshotHandle, SnapshotStore
from langchain_agentcompact.states import State
from langchain_agentcompact.tool_calls import ParsedReply, VisibleText, parse_reply

OnCompaction = Callable[[CompactionReport], None]

LAST_RESORT = "streaming_llm"
"""The strategy that needs nothing and does not fail, for a conversation that must be brought down."""
_STRATEGY_FAULTS = (AgentCompactError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What a strategy, perhaps somebody else's, may raise."""


@dataclass(frozen=True)
class Turn:
    """A request.

    schema: what the answer must match, or None. forces_call: whether that is a tool call's. reads_calls: whether tool
    calls are read out of the reply. forbids_calls: whether it may not be one. resume: a snapshot to go on from, if it
    is there. store: where snapshots lie, or None. keeps_snapshot: whether to keep one after a compaction.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    policy: SessionPolicy
    sampling: SamplingSettings
    schema: dict[str, Any] | None = None
    forces_call: bool = False
    reads_calls: bool = False
    forbids_calls: bool = False
    resume: SnapshotHandle | None = None
    store: SnapshotStore | None = None
    keeps_snapshot: bool = False
    max_states: int = 16
    pool_bytes: int = 2**31


@dataclass
class Answer:
    """A reply and its costs.

    finish_reason: "eos", "stop" or "length". prompt_tokens: logical tokens of the whole prompt. prefilled: those of
    them that were read now. held: held positions behind the reply; entries: all of them, over layers and heads.
    """

    content: str
    calls: list[ToolCall]
    failed: list[str]
    finish_reason: str
    prompt_tokens: int = 0
    prefilled: int = 0
    decoded: int = 0
    held: float = 0.0
    entries: int = 0
    reports: list[CompactionReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    handle: SnapshotHandle | None = None
    resumed: str = ""


@dataclass
class _Decoded:
    parsed: ParsedReply
    finish_reason: str
    tokens: int


class TurnRunner:
    """Runs the turns of one model, one at a time."""

    def __init__(self, shared: SharedModel) -> None:
        self.shared = shared
        self._sizes: OrderedDict[tuple[str, str, int], int] = OrderedDict()

    def run(self, turn: Turn, on_text: OnText | None = None, on_compaction: OnCompaction | None = None) -> Answer:
        """Answer a turn, under the model's lock.

        Raises ContextOverflowError where the conversation cannot be brought down, InputError for what cannot be read.
        """
        engine, template = self.shared.engine, self.shared.template(turn.tools)
        rendered, ending = template.render(turn.messages), template.ending()
        tools = tools_digest(turn.tools)
        pairs = list(zip(turn.messages, rendered.pieces, strict=True))
        items = [Item(message, piece, None, ending) for message, piece in pairs]
        state, resumed = self._state(turn, items, tools)
        manager = state.manager
        replies = self._follow(manager, turn.messages)
        items = [Item(message, piece, replies.get(n), ending) for n, (message, piece) in enumerate(pairs)]
        before = engine.counters.prefilled_tokens
        prefix = self.shared.form.prefix if turn.forces_call else ""
        begin_ids = [*manager.context.template_ids(rendered.reply), *manager.context.template_ids(prefix)]
        try:
            reports, notes = self._read(manager, items, len(begin_ids), turn, on_compaction)
            decoded = self._decode(manager, rendered, begin_ids, turn, on_text)
        except BaseException:
            if not manager.context.held:
                self.shared.pool.drop(state)
            raise
        prefilled = engine.counters.prefilled_tokens - before
        answer = Answer(decoded.parsed.content, decoded.parsed.calls, decoded.parsed.failed, decoded.finish_reason)
        answer.prompt_tokens = max(prefilled, self._logical(manager.context, items) + len(begin_ids))
        answer.prefilled, answer.decoded = prefilled, decoded.tokens
        answer.held, answer.entries = manager.cache.held_positions, manager.cache.entries
        answer.reports, answer.notes, answer.resumed = reports, notes, resumed
        answer.handle = self._snapshot(turn, manager, tools, bool(reports), notes)
        self.shared.pool.trim(state, turn.max_states, turn.pool_bytes)
        return answer

    # Finding what is held

    def _state(self, turn: Turn, items: Sequence[Item], tools: str) -> tuple[State, str]:
        """Return the state to go on from, and the snapshot that it was read from, if it was."""
        pool, handle, template = self.shared.pool, turn.resume, self.shared.template(turn.tools)
        if handle is not None and turn.store is not None:
            best = pool.best(items, tools, turn.policy)
            if best is None or best.common < handle.messages:
                context = turn.store.load(handle, self.shared.engine, turn.messages, tools)
                if context is not None:
                    return pool.resumed(context, template, tools, turn.policy), handle.snapshot
        return pool.take(items, template, tools, turn.policy), ""

    @staticmethod
    def _follow(manager: MemoryManager, messages: list[Message]) -> dict[int, ReplyTokens]:
        """Give a manager the conversation; return the tokens of the replies in it that it generated."""
        state, old = manager.state, manager.state.messages
        state.replies = {
            index: reply
            for index, reply in state.replies.items()
            if index < min(len(old), len(messages)) and old[index].key == messages[index].key
        }
        state.messages = list(messages)
        return state.replies

    # Reading

    def _read(
        self, manager: MemoryManager, items: Sequence[Item], begun: int, turn: Turn, told: OnCompaction | None
    ) -> tuple[list[CompactionReport], list[str]]:
        """Read what is new, compacting where the policy says so; where that fails, otherwise or not at all."""
        policy, wanted = turn.policy, turn.sampling.max_new_tokens
        ways = [policy]
        if policy.auto:
            ways.append(policy.model_copy(update={"strategy": LAST_RESORT, "settings": {}, "min_fidelity": None}))
            ways.insert(1, policy.model_copy(update={"auto": False}))
        notes: list[str] = []
        reports: list[CompactionReport] = []
        first: Exception | None = None
        for way in ways:
            manager.policy, manager.after_compaction = way, _collecting(reports, told)
            try:
                manager.read(items, begun, wanted)
            except (SettingsError, CapabilityError):
                raise  # what was asked for does not exist
            except _STRATEGY_FAULTS as error:
                first = first or error
                notes.append(f"{way.strategy if way.auto else 'reading without compaction'}: {error}")
                continue
            finally:
                manager.policy, manager.after_compaction = policy, None
            return reports, [*notes, *manager.notes]
        raise ContextOverflowError(f"the conversation does not fit the window: {first}") from first

    def _logical(self, context: Context, items: Sequence[Item]) -> int:
        """Return the tokens of messages as they were read, whatever was compacted since."""
        total = 0 if self.shared.engine.has_chat_template else len(self.shared.engine.beginning())
        for item in items:
            key = (item.message.key, item.piece, 0 if item.reply is None else hash(item.reply.token_ids))
            if key not in self._sizes:
                self._sizes[key] = len(context.token_ids(item))
            self._sizes.move_to_end(key)
            total += self._sizes[key]
        while len(self._sizes) > 8192:
            self._sizes.popitem(last=False)
        return total

    def count(self, messages: list[Message], tools: list[dict[str, Any]]) -> int:
        """Return the tokens of a prompt, the beginning of the reply included, as if nothing had been generated here."""
        template = self.shared.template(tools)
        rendered, ending = template.render(messages), template.ending()
        context = Context(self.shared.engine)
        pairs = zip(messages, rendered.pieces, strict=True)
        items = [Item(message, piece, None, ending) for message, piece in pairs]
        return self._logical(context, items) + len(context.template_ids(rendered.reply))

    # Answering

    def _decode(
        self, manager: MemoryManager, rendered: Rendered, begin_ids: list[int], turn: Turn, on_text: OnText | None
    ) -> _Decoded:
        """Decode a reply behind the cache and hold it. After an error the cache is as it was before it."""
        context, start = manager.context, manager.cache.next_position
        sampling = turn.sampling.model_copy(update={"max_new_tokens": self._room(manager, len(begin_ids), turn)})
        constraint, stops = self._constraint(turn, sampling)
        sampling = sampling.model_copy(update={"stop": stops})
        shown = VisibleText(self.shared.form, watching=turn.reads_calls)
        show = _nothing if on_text is None or turn.forces_call else on_text
        parsed = ParsedReply("")

        def read(text: str) -> Message:
            nonlocal parsed
            parsed = self._parsed(text, turn)
            show(shown.finish(parsed.content))
            return reply_message(parsed)

        made = decode_reply(
            self.shared.engine,
            manager.cache,
            begin_ids,
            sampling,
            lambda piece: show(shown.add(piece)),
            read,
            constraint=constraint,
            keeps_partial=False,
        )
        if made.token_ids is not None:
            begun_ids = begin_ids[len(context.template_ids(rendered.reply)) :]
            closing = context.template_ids(self.shared.form.suffix) if turn.forces_call else []
            reply = ReplyTokens(rendered.reply, (*begun_ids, *made.token_ids, *closing))
            context.hold_reply(made.message, start, reply)
            manager.state.replies[len(turn.messages)] = reply
        manager.state.messages.append(made.message)
        return _Decoded(parsed, made.finish_reason, made.decoded)

    def _constraint(self, turn: Turn, sampling: SamplingSettings) -> tuple[TokenConstraint | None, tuple[str, ...]]:
        """Return what the reply must keep to, and the strings that end it."""
        stops = (*sampling.stop, *self.shared.template(turn.tools).stop)
        if turn.forbids_calls:
            plain = PlainReply(self.shared.engine, self.shared.form)
            return plain, (*stops, *plain.stops)
        if turn.schema is None:
            return None, stops
        from langchain_agentcompact.constraint import JsonConstraint

        try:
            constraint = JsonConstraint(self.shared.grammar_tokenizer, turn.schema, sampling.max_new_tokens)
        except ContextLengthError as error:
            raise ContextOverflowError(str(error)) from error
        return constraint, ()  # a stop string inside would leave it incomplete

    def _room(self, manager: MemoryManager, begun: int, turn: Turn) -> int:
        """Return how many tokens the reply may have. Raises ContextOverflowError where not even a few are left."""
        cache, wanted = manager.cache, turn.sampling.max_new_tokens
        room = reply_room(manager.window, cache.held_positions, begun, wanted)
        room = min(room, manager.engine.geometry.max_positions - cache.next_position - begun)
        if room < min(wanted, SMALLEST_REPLY):
            held = math.ceil(cache.held_positions)
            raise ContextOverflowError(
                f"the conversation holds {held:,} of {manager.window:,} positions, which leaves no room for a reply: "
                "raise window or ratio, or keep fewer messages"
            )
        return room

    def _parsed(self, text: str, turn: Turn) -> ParsedReply:
        if turn.forces_call:
            call = json.loads(text)
            found = parse_reply(json.dumps([call]), [call["name"]])
            return ParsedReply("", found.calls)
        if not turn.reads_calls:
            return ParsedReply(text)
        return parse_reply(text, [tool["function"]["name"] for tool in turn.tools])

    def _snapshot(
        self, turn: Turn, manager: MemoryManager, tools: str, compacted: bool, notes: list[str]
    ) -> SnapshotHandle | None:
        """Keep a snapshot after a compaction, where that was asked for; a full disk costs the snapshot, no reply."""
        if turn.store is None or not (turn.keeps_snapshot and compacted and turn.policy.snapshot_bytes):
            return None
        try:
            return turn.store.save(manager.context, tools, turn.policy.snapshot_bytes)
        except AgentCompactError as error:
            notes.append(f"no snapshot was kept: {error}")
            return None


def _nothing(_: str) -> None:
    """Show no text."""


def reply_message(parsed: ParsedReply) -> Message:
    """Return a reply as it will come back in the next call's messages."""
    content = "\n".join(part for part in (parsed.content, *parsed.failed) if part)
    return Message(role="assistant", content=content, tool_calls=tuple(parsed.calls))


def tools_digest(tools: Sequence[dict[str, Any]]) -> str:
    """Return a digest of the tools that a prompt describes."""
    return hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).hexdigest()[:32]


def _collecting(reports: list[CompactionReport], told: OnCompaction | None) -> OnCompaction:
    def collect(report: CompactionReport) -> None:
        reports.append(report)
        if told is not None:
            told(report)

    return collect
