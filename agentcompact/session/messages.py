"""Messages of a conversation, as the field writes them: roles, contents, tool calls and their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentcompact.errors import InputError

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(BaseModel):
    """A call that the assistant asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str = ""


class Message(BaseModel):
    """One message. A tool's result names its call by `tool_call_id`, and the tool by `name`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """A digest of everything in it: equal messages have equal keys."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def to_template(self) -> dict[str, Any]:
        """Return the dictionary that chat templates expect."""
        made: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            made["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            made["tool_call_id"] = self.tool_call_id
        if self.name:
            made["name"] = self.name
        return made


def as_message(value: Message | Mapping[str, Any]) -> Message:
    """Read a message, or a dictionary in the shape that chat APIs use. Raises InputError for what is none."""
    if isinstance(value, Message):
        return value
    data = dict(value)
    try:
        data["tool_calls"] = [_tool_call(call) for call in data.get("tool_calls") or ()]
        data["content"] = data.get("content") or ""
        return Message(**{name: each for name, each in data.items() if each is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise InputError(f"no message: {where}={first.get('input')!r}: {first['msg']}") from error


def _tool_call(value: Any) -> Any:
    """Flatten {"function": {"name": …, "arguments": "…"}}, as APIs write it."""
    if not isinstance(value, Mapping) or "function" not in value:
        return value
    function = value["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InputError(f"the arguments of the call of '{function.get('name')}' are no JSON: {error}") from error
    return {"name": function.get("name"), "arguments": arguments, "id": value.get("id") or ""}


def round_start(messages: Sequence[Message], index: int) -> int:
    """Return where the tool-call round begins that `index` is inside of, or `index` itself.

    A round is the assistant's message with its calls and all tool results behind it; it is never split.
    """
    start = index
    while 0 < start < len(messages) and messages[start].role == "tool":
        start -= 1
    return start if start != index and messages[start].role == "assistant" else index


def round_of(messages: Sequence[Message], index: int) -> range:
    """Return the tool-call round that a message belongs to: call and results, or the message alone."""
    start = round_start(messages, index)
    end = index + 1
    if messages[start].tool_calls:
        while end < len(messages) and messages[end].role == "tool":
            end += 1
    return range(start, end)


def has_open_call(messages: Sequence[Message]) -> bool:
    """Whether the last round still waits for the result of a call."""
    end = len(messages)
    while end and messages[end - 1].role == "tool":
        end -= 1
    if not end or not messages[end - 1].tool_calls:
        return False
    calls = messages[end - 1].tool_calls
    results = messages[end:]
    answered = {message.tool_call_id for message in results if message.tool_call_id}
    named = [call.id for call in calls if call.id]
    return not set(named) <= answered if named and answered else len(results) < len(calls)
