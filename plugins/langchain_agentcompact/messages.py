"""LangChain's messages and tools, as the session's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from agentcompact.errors import InputError
from agentcompact.session.messages import Message, ToolCall
from agentcompact.session.rendering import tool_response_text

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "system",
}
_CALL_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"})
_SILENT_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""What a model thought is no part of a later prompt."""


def read_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Return the messages as sessions take them.

    The result of a tool that no message before it called becomes a user's message, since templates refuse it or write
    it as the answer to another call. Raises InputError for a role or a content block that the model cannot read.
    """
    made: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        if isinstance(message, ToolMessage) and message.tool_call_id not in names:
            text = tool_response_text(message.name or "", _text(message.content))
            made.append(Message(role="user", content=text))
            continue
        each = _read(message, names)
        names.update({call.id: call.name for call in each.tool_calls})
        made.append(each)
    if not made:
        raise InputError("there is no message to answer: give at least one")
    return made


def _read(message: BaseMessage, names: dict[str, str]) -> Message:
    if isinstance(message, SystemMessage):
        return Message(role="system", content=_text(message.content))
    if isinstance(message, HumanMessage):
        return Message(role="user", content=_text(message.content))
    if isinstance(message, AIMessage):
        return read_reply(message)
    if isinstance(message, ToolMessage):
        name = message.name or names[message.tool_call_id]
        return Message(role="tool", content=_text(message.content), tool_call_id=message.tool_call_id, name=name)
    if isinstance(message, FunctionMessage):
        return Message(role="user", content=tool_response_text(message.name, _text(message.content)))
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return Message.model_validate({"role": _ROLES[message.role], "content": _text(message.content)})
    named = f"role '{message.role}'" if isinstance(message, ChatMessage) else f"type '{message.type}'"
    raise InputError(f"a message of {named} cannot be read: use system, human, ai or tool messages")


def read_reply(message: AIMessage) -> Message:
    """Return an assistant's message. Calls that could not be parsed are part of its text."""
    calls = tuple(
        ToolCall(name=call["name"], arguments=call["args"], id=call["id"] or "") for call in message.tool_calls
    )
    text = _text(message.content, joined="")
    failed = [call.get("args") or "" for call in message.invalid_tool_calls]
    return Message(role="assistant", content="\n".join(part for part in (text, *failed) if part), tool_calls=calls)


def _text(content: str | list[str | dict[Any, Any]], joined: str = "\n") -> str:
    if isinstance(content, str):
        return _checked(content)
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
            continue
        kind = block.get("type")
        if kind == "text":
            parts.append(str(block.get("text", "")))
        elif kind == "json":
            parts.append(json.dumps(block.get("json"), ensure_ascii=False))
        elif kind not in _CALL_BLOCKS and kind not in _SILENT_BLOCKS:
            raise InputError(f"the model reads text only: take the content block of type '{kind}' out of the messages")
    return _checked(joined.join(part for part in parts if part))


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"a message is not UTF-8: character {error.start + 1:,} is none") from error
    return text


def read_tools(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Return tools as JSON schemas in the form that chat templates expect."""
    return [convert_to_openai_tool(tool) for tool in tools]
