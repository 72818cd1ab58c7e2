"""Messages as the text of a model's chat template, one piece a message, with fallbacks for what a template lacks.

Fallbacks, each used only where the template cannot do it itself: a system message goes in front of the first user's
message; tools are described in the system message, calls are written as <tool_call> JSON in the assistant's message
and results as <tool_response> in a user's; without any template messages are paragraphs that begin with the role.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentcompact.cache import PromptFormat
from agentcompact.errors import InputError
from agentcompact.session.control_text import ControlText
from agentcompact.session.messages import Message, ToolCall

ChatRenderer = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None, bool], str]
"""Renders messages with tools (or None), with or without the beginning of a reply. Raises InputError if it cannot."""

TOOLS_INTRODUCTION = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and arguments as JSON, and nothing else:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)
_PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
_PROBE = "PROBE7c41d2"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    pieces: one a message; what a message wrote that has no boundary of its own is in the piece of the next that has
    one, and its own is "". reply: what the template writes to begin the assistant's reply.
    """

    pieces: list[str]
    reply: str


class ConversationTemplate:
    """Renders conversations by a model's chat template, or as plain paragraphs where it has none."""

    def __init__(
        self,
        chat: ChatRenderer | None,
        tools: Sequence[dict[str, Any]] | None = None,
        controls: frozenset[str] = frozenset(),
    ) -> None:
        """controls: the model's control strings, which messages may spell without meaning them."""
        self._chat = chat
        self._controls = ControlText(controls)
        self._known: tuple[list[Message], list[str]] = ([], [])
        self.tools = list(tools or ())
        self.takes_system = self._shows([_probe("system"), _probe("user", "a")], _PROBE)
        self.takes_tool_results = self._shows(_TOOL_ROUND, _PROBE) and self._shows(_TOOL_ROUND, "probe_call")
        self.takes_tools = self._shows([_probe("user")], "probe_tool", [_PROBE_TOOL])

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a reply, beside the model's own end tokens."""
        return ("\nUser:", "\nSystem:") if self._chat is None else ()

    @property
    def fallbacks(self) -> list[str]:
        """What the template cannot do itself, a line each."""
        if self._chat is None:
            return ["the model has no chat template: messages are plain paragraphs"]
        lines = [] if self.takes_system else ["system messages go in front of the first user's message"]
        if self.tools and not self.takes_tools:
            lines.append("tools are described in the system message")
        if self.tools and not self.takes_tool_results:
            lines.append("tool calls and results are written as text")
        return lines

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Return the pieces of all messages and what begins a reply. Raises InputError where it cannot be rendered."""
        if not messages:  # templates refuse that
            return Rendered([], "")
        messages = [self._controls.hidden(message) for message in messages]
        whole = self._text(messages, reply=False)
        asked = self._text(messages, reply=True)
        if not asked.startswith(whole):  # a template that changes its last message when a reply is to come
            whole, reply = asked, ""
        else:
            reply = asked[len(whole) :]
        pieces = self._pieces_as_before(messages, whole)
        done = sum(map(len, pieces))
        for count in range(len(pieces) + 1, len(messages) + 1):
            end = len(whole) if count == len(messages) else self._boundary(messages, count, whole, done)
            pieces.append(whole[done:end])
            done = end
        self._known = (messages, pieces)
        return Rendered(list(pieces), reply)

    def _pieces_as_before(self, messages: Sequence[Message], whole: str) -> list[str]:
        """Return the pieces of the messages that were rendered before and are written alike now.

        Finding a piece's end renders everything before it, so a long conversation would cost a square.
        """
        pieces: list[str] = []
        done = 0
        for message, known, piece in zip(messages[:-1], *self._known, strict=False):
            if message != known or not whole.startswith(piece, done):
                break
            pieces.append(piece)
            done += len(piece)
        while pieces and pieces[-1] == "":  # its text is in the next message's piece
            pieces.pop()
        return pieces

    def ending(self) -> str:
        """Return what is written behind the content of an assistant's message."""
        if self._chat is None:
            return "\n\n"
        text = self._text([Message(role="user", content="a"), Message(role="assistant", content=_PROBE)], reply=False)
        return text.rpartition(_PROBE)[2]

    def prompt_format(self) -> PromptFormat:
        """Return how a strategy asks the model something behind the conversation."""
        talk = [Message(role="user", content="a"), Message(role="assistant", content="b")]
        rendered = self.render([*talk, Message(role="user", content=_PROBE)])
        opening, _, closing = rendered.pieces[-1].rpartition(_PROBE)
        return PromptFormat(
            kind="chat",
            opening=opening,
            before_question="",
            after_question=closing + rendered.reply,
            stop=self.stop,
        )

    def _boundary(self, messages: Sequence[Message], count: int, whole: str, done: int) -> int:
        """Return where the first `count` messages end in the whole text, or `done` where that cannot be told."""
        if count == 1 and messages[0].role == "system" and not self.takes_system:  # it is in front of the user's
            text = "\n\n".join(self._system(messages)).strip()
            return max(done, whole.find(text) + len(text)) if text and text in whole else done
        try:
            part = self._text(messages[:count], reply=False)
        except InputError:  # some templates want a user's message behind a system's
            return done
        return len(part) if len(part) >= done and whole.startswith(part) else done

    def _text(self, messages: Sequence[Message], *, reply: bool) -> str:
        if self._chat is None:
            return _plain(self._prepared(messages), reply)
        return self._chat(self._prepared(messages), self.tools if self.tools and self.takes_tools else None, reply)

    def _prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as the template takes them."""
        system = self._system(messages)
        rest = messages[1:] if messages and messages[0].role == "system" else messages
        made: list[dict[str, Any]] = []
        if system and self.takes_system:
            made.append({"role": "system", "content": "\n\n".join(system)})
            system = []
        for message in rest:
            each = message.to_template() if self.takes_tool_results else _without_tools(message)
            if not self.takes_system and each["role"] == "system":
                each["role"] = "user"
            if system and each["role"] == "user":
                each["content"] = "\n\n".join([*system, each["content"]])
                system = []
            if made and not self.takes_tool_results and each["role"] == made[-1]["role"] == "user":
                made[-1]["content"] += "\n" + each["content"]  # templates without tools want the roles to alternate
            else:
                made.append(each)
        if system:  # nobody has spoken yet
            made.append({"role": "user", "content": "\n\n".join(system)})
        return made

    def _system(self, messages: Sequence[Message]) -> list[str]:
        """Return the paragraphs of the system message: its content, and tools that the template does not know."""
        system = [m.content for m in messages[:1] if m.role == "system"]
        if self.tools and not self.takes_tools:
            described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.tools)
            system.append(TOOLS_INTRODUCTION.format(tools=described))
        return system

    def _shows(
        self, messages: Sequence[dict[str, Any]], wanted: str, tools: Sequence[dict[str, Any]] | None = None
    ) -> bool:
        """Whether the template renders these messages, and writes what is wanted."""
        if self._chat is None:
            return not tools and all(m["role"] != "tool" for m in messages)
        try:
            return wanted in self._chat(messages, tools, False)
        except InputError:
            return False


def tool_call_text(call: ToolCall) -> str:
    """Write a call as models are asked to write it."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def tool_response_text(name: str, content: str) -> str:
    """Write a tool's result for a template that knows no tools."""
    called = f"{name}: " if name else ""
    return f"<tool_response>\n{called}{content}\n</tool_response>"


def _without_tools(message: Message) -> dict[str, Any]:
    """Return a message whose calls and results are plain text."""
    if message.role == "tool":
        return {"role": "user", "content": tool_response_text(message.name, message.content)}
    calls = [tool_call_text(call) for call in message.tool_calls]
    return {"role": message.role, "content": "\n".join([*([message.content] if message.content else []), *calls])}


def _plain(messages: Sequence[dict[str, Any]], reply: bool) -> str:
    text = "".join(f"{_PLAIN_NAMES[m['role']]}: {m['content']}\n\n" for m in messages)
    return text + "Assistant:" if reply else text


def _probe(role: str, content: str = _PROBE) -> dict[str, Any]:
    return {"role": role, "content": content}


_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_TOOL_ROUND = [
    _probe("user", "a"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "probe0001", "function": {"name": "probe_call", "arguments": {}}}],
    },
    {"role": "tool", "content": _PROBE, "name": "probe_call", "tool_call_id": "probe0001"},
]
