"""A conversation with a model that never reaches the end of its context: the one class that users need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentcompact.api import as_engine, library_version
from agentcompact.cache import CompactedCache
from agentcompact.engines import Engine, Progress
from agentcompact.errors import InputError, SettingsError
from agentcompact.models import LoadedModel
from agentcompact.session.compaction import CompactionReport
from agentcompact.session.context import Item, ReplyTokens
from agentcompact.session.journal import Journal
from agentcompact.session.manager import AfterCompaction, BeforeCompaction, MemoryManager
from agentcompact.session.messages import Message, as_message, has_open_call, round_of
from agentcompact.session.planning import reply_room
from agentcompact.session.policy import SMALLEST_REPLY, SessionPolicy, read_policy
from agentcompact.session.rendering import ConversationTemplate
from agentcompact.session.replying import OnText, decode_reply
from agentcompact.session.state import replay
from agentcompact.session.status import MessageStatus, SessionStatus, by_kind, message_table
from agentcompact.settings import SamplingSettings
from agentcompact.strategies import make_strategy


@dataclass
class Reply:
    """An answer of the model.

    finish_reason: "eos", "stop", "length" or "interrupted". prefilled: tokens read for the conversation before it;
    decoded: its own; compactions: what was compacted before it. notes: what a person should know.
    """

    message: Message
    finish_reason: str
    prefilled: int = 0
    decoded: int = 0
    compactions: list[CompactionReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.message.content


class Session:
    """A conversation: messages go in, replies come out, and the memory manager keeps the cache within the window.

        >>> session = Session(load_model("smollm2"), strategy="two_pass", window=2000)
        >>> print(session.send("My name is Ada.").text)

    With a folder everything is journaled: opened again, it goes on where it was, also after a crash.
    """

    def __init__(
        self,
        model: LoadedModel | Engine,
        policy: SessionPolicy | None = None,
        *,
        folder: str | Path | None = None,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: SamplingSettings | None = None,
        before_compaction: BeforeCompaction | None = None,
        after_compaction: AfterCompaction | None = None,
        **settings: Any,
    ) -> None:
        """settings: those of `SessionPolicy`, instead of a policy or beside it; the environment gives the rest.

        system: the system message of a new session. tools: their JSON schemas, for the template. before_compaction:
        called with the plan; may return False (a veto) or a text to focus on. after_compaction: called with the report.
        Raises SettingsError for a policy that makes no sense, InputError where the session is open elsewhere or was
        made with another model.
        """
        self.engine = as_engine(model)
        self.policy = read_policy(None, **{**({} if policy is None else policy.model_dump()), **settings})
        self.check_strategy(self.policy)
        self.sampling = sampling or SamplingSettings(max_new_tokens=512)
        chat = self._render if self.engine.has_chat_template else None
        self.template = ConversationTemplate(chat, tools, self.engine.control_strings())
        self._ending = self.template.ending()
        self.journal = Journal(None if folder is None else Path(folder))
        try:
            state = replay(self.journal.events())
            self._check_model(state.created)
            self.memory = MemoryManager(
                self.engine,
                self.journal,
                state,
                self.policy,
                self.template.prompt_format(),
                before_compaction,
                after_compaction,
            )
            if not state.created:
                self._begin(system)
        except BaseException:
            self.journal.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Save the cache beside the journal and give the session free."""
        try:
            if self.journal.folder is not None:
                self.memory.save()
        finally:
            self.journal.close()

    # Messages

    @property
    def messages(self) -> list[Message]:
        """The whole transcript, compacted or not."""
        return list(self.memory.state.messages)

    @property
    def cache(self) -> CompactedCache:
        return self.memory.cache

    def add(self, message: Message | Mapping[str, Any] | str) -> Message:
        """Append a message (a text is a user's); it is read with the next reply. Raises InputError for what is none."""
        made = Message(role="user", content=message) if isinstance(message, str) else as_message(message)
        _check_text(made.content)
        if made.role == "system" and self.messages:
            raise InputError("a system message comes first")
        self.memory.record("message", message=made.model_dump(mode="json"))
        return made

    def send(self, text: str, on_text: OnText | None = None, progress: Progress | None = None) -> Reply:
        """Say something and return the reply."""
        if not text.strip():
            raise InputError("the message is empty")
        self.add(text)
        return self.reply(on_text, progress)

    def reply(
        self,
        on_text: OnText | None = None,
        progress: Progress | None = None,
        *,
        read_message: Callable[[str], Message] | None = None,
        max_new_tokens: int | None = None,
    ) -> Reply:
        """Let the model answer, compacting before where the policy says so.

        on_text: gets the text as it comes. read_message: makes the message of the reply's text, for tool calls. An
        interrupt while it writes keeps what was written. Raises InputError where it is not the model's turn,
        ContextLengthError where the conversation cannot be made to fit.
        """
        return self._reply(len(self.messages), on_text, progress, read_message, max_new_tokens)

    def _reply(
        self,
        count: int,
        on_text: OnText | None,
        progress: Progress | None,
        read_message: Callable[[str], Message] | None = None,
        max_new_tokens: int | None = None,
    ) -> Reply:
        """Answer the first `count` messages; what came after them is replaced when the reply is there."""
        messages = self.memory.state.messages[:count]
        if not messages or messages[-1].role == "assistant" or has_open_call(messages):
            raise InputError("it is not the model's turn: add a message first")
        begun_at = time.perf_counter()
        items, begun = self._items(count)
        begin_ids = self.memory.context.template_ids(begun)
        wanted = max_new_tokens or self.sampling.max_new_tokens
        read, reports = self.memory.read(items, len(begin_ids), wanted, progress)
        room = reply_room(self.memory.window, self.cache.held_positions, len(begin_ids), wanted)
        made = self._decode(count, begun, begin_ids, max(room, 1), on_text, read_message)
        made.prefilled, made.compactions = read + len(begin_ids), reports
        made.notes += self.memory.notes
        if room < min(wanted, SMALLEST_REPLY):
            made.notes.append(f"the window left {room} tokens for the reply")
        made.seconds = time.perf_counter() - begun_at
        return made

    def edit(self, number: int, content: str) -> None:
        """Replace the content of message `number` (from 1) and forget what was said after it."""
        message = self._message(number)
        _check_text(content)
        edited = message.model_copy(update={"content": content})
        self.memory.record("replaced", count=number - 1, message=edited.model_dump(mode="json"))

    def delete_from(self, number: int) -> None:
        """Forget message `number` (from 1) and everything after it."""
        self._message(number)
        self.memory.record("truncated", count=number - 1)

    def regenerate(self, on_text: OnText | None = None, progress: Progress | None = None) -> Reply:
        """Let the model answer again; the last reply stays until the new one is there."""
        count = len(self.messages)
        if count and self.messages[-1].role == "assistant":
            count -= 1
        return self._reply(count, on_text, progress)

    def clear(self) -> None:
        """Begin anew behind the system message; the journal keeps what was."""
        kept = 1 if self.messages and self.messages[0].role == "system" else 0
        self.memory.record("cleared", count=kept)
        self.memory.forget()

    def pin(self, number: int) -> bool:
        """Pin message `number` (from 1), so that it is never compacted, or unpin it; return whether it is pinned now.

        A tool call and its results are pinned together. Raises InputError where it is compacted already: what was lost
        of it cannot be pinned.
        """
        self._message(number)
        index, state = number - 1, self.memory.state
        pinned = index not in state.pinned
        table, indices = self.message_table(), round_of(state.messages, index)
        if pinned and any(table[each].state == "compacted" for each in indices):
            raise InputError(f"message {number} is compacted already: /undo first, or say it again and pin that")
        for each in indices:
            self.memory.record("pinned", index=each, pinned=pinned)
        return pinned

    # Memory

    def compact(self, focus: str | None = None, progress: Progress | None = None) -> CompactionReport:
        """Compact now what is neither pinned nor kept. Raises InputError where there is nothing to compact."""
        if has_open_call(self.messages):
            raise InputError("a tool call is open: its result comes first")
        items, _ = self._items()
        return self.memory.compact_now(items, focus, progress)

    def undo(self) -> CompactionReport:
        """Take back the last compaction; return its report. Raises InputError where that cannot be done."""
        return self.memory.undo()

    def configure(self, **settings: Any) -> SessionPolicy:
        """Change settings of the policy from now on. Raises SettingsError for what makes no sense."""
        policy = read_policy(None, **{**self.policy.model_dump(), **settings})
        self.check_strategy(policy)
        self.policy = self.memory.policy = policy
        if settings.get("auto"):
            self.memory.paused = ""
        return policy

    def check_strategy(self, policy: SessionPolicy) -> None:
        """Raise what is wrong with the policy's strategies before they are needed."""
        methods = [make_strategy(policy.strategy, **policy.settings)]
        if policy.second_strategy is not None:
            methods.append(make_strategy(policy.second_strategy))
        for method in methods:
            method.check_engine(self.engine)
            if method.trains:
                raise SettingsError(
                    f"strategy '{method.name}' trains for minutes or hours, once per document: a conversation would "
                    "wait for it at each compaction. Use it with `agentcompact compact`, and another one here"
                )

    @property
    def reports(self) -> list[CompactionReport]:
        """The reports of all compactions so far, undone ones too."""
        return list(self.memory.state.reports)

    def message_table(self) -> list[MessageStatus]:
        """Return what every message costs, and whether it is compacted."""
        memory = self.memory
        return message_table(
            memory.state.messages,
            memory.context.held,
            memory.cache,
            memory.state.pinned,
            memory.context.compacted_until,
        )

    def status(self) -> SessionStatus:
        """Return what the session holds, by kind, and its limits."""
        memory, kinds = self.memory, by_kind(self.message_table())
        return SessionStatus(
            window=memory.window,
            trigger=self.policy.trigger_tokens(memory.window),
            **kinds,
            logical=memory.cache.next_position,
            limit=self.engine.geometry.max_positions,
            nbytes=memory.cache.nbytes,
            compactions=len(memory.state.compactions),
            paused=memory.paused,
            auto=self.policy.auto,
        )

    # Inside

    def _decode(
        self,
        count: int,
        begun: str,
        begin_ids: list[int],
        room: int,
        on_text: OnText | None,
        read_message: Callable[[str], Message] | None,
    ) -> Reply:
        """Decode a reply behind the cache and take note of it."""
        context, start = self.memory.context, self.cache.next_position
        stops = (*self.sampling.stop, *self.template.stop)
        sampling = self.sampling.model_copy(update={"max_new_tokens": room, "stop": stops})
        made = decode_reply(self.engine, self.cache, begin_ids, sampling, on_text, read_message)
        data: dict[str, Any] = {"message": made.message.model_dump(mode="json")}
        if made.token_ids is not None:
            reply = ReplyTokens(begun, tuple(made.token_ids))
            context.hold_reply(made.message, start, reply)
            data["reply"] = {"begun": begun, "token_ids": list(reply.token_ids)}
        if count < len(self.memory.state.messages):
            self.memory.record("replaced", count=count, **data)
        else:
            self.memory.record("message", **data)
        return Reply(made.message, made.finish_reason, decoded=made.decoded)

    def _items(self, count: int | None = None) -> tuple[list[Item], str]:
        """Return the (first) messages with their pieces of the template's text, and what begins the next reply."""
        state = self.memory.state
        messages = state.messages[:count]
        rendered = self.template.render(messages)
        ending = self._ending
        items = [
            Item(message, piece, state.replies.get(index), ending)
            for index, (message, piece) in enumerate(zip(messages, rendered.pieces, strict=True))
        ]
        return items, rendered.reply

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, reply: bool) -> str:
        return self.engine.render_chat(messages, tools, generation_prompt=reply)

    def _message(self, number: int) -> Message:
        if not 1 <= number <= len(self.messages):
            raise InputError(f"there is no message {number}: there are {len(self.messages)}")
        return self.messages[number - 1]

    def _begin(self, system: str | None) -> None:
        described = self.engine.describe()
        self.memory.record(
            "created",
            model=described.model_source,
            fingerprint=described.model_fingerprint,
            dtype=described.model_dtype,
            version=library_version(),
        )
        if system:
            self.add(Message(role="system", content=system))

    def _check_model(self, created: Mapping[str, Any]) -> None:
        """Raise InputError where a session was made with another model: its tokens would mean something else."""
        described = self.engine.describe()
        if created and created.get("fingerprint") != described.model_fingerprint:
            raise InputError(
                f"the session was made with {created.get('model') or 'another model'}, not with "
                f"{described.model_source}: name that model, or begin a new session"
            )


def _check_text(text: str) -> None:
    """Raise InputError for half characters, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the message is not UTF-8: character {error.start + 1:,} is none") from error
