"""How models write tool calls: the form a template declares, and reading calls out of replies."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcompact.errors import InputError
from agentcompact.session.messages import ToolCall
from agentcompact.session.rendering import ChatRenderer

_ID_LENGTH = 9  # Mistral's templates take no other
_PROBE_NAME = "probe_call_5d"
_PROBE_ARGUMENTS = {"probe_argument": "probe_value"}
_WRAPPED = re.compile(
    r"<tool_call>(?P<json>.*?)(?:</tool_call>|\Z)"
    r"|<function=(?P<name>[^>\s]+)>(?P<arguments>.*?)(?:</function>|\Z)"
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>)(?P<rest>.*)\Z",
    re.DOTALL,
)
_FUNCTION = re.compile(r"<function=(?P<name>[^>\s]+)>(?P<arguments>.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<name>[^>\s]+)>(?P<value>.*?)</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[ARGS\])\s*(?P<arguments>\{.*)\Z", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json|tool_call|tool_code)?\s*\n(?P<body>.*?)\n?```\Z", re.DOTALL)
_OPENERS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")
_BARE_OPENERS = ("{", "[", "```")


@dataclass(frozen=True)
class ToolCallForm:
    """What a template writes around the JSON of one call, and the key of its arguments."""

    prefix: str = "<tool_call>\n"
    suffix: str = "\n</tool_call>"
    arguments_key: str = "arguments"


def read_form(chat: ChatRenderer | None) -> ToolCallForm:
    """Return the form in which a template writes a call as JSON; the common <tool_call> form where it has none."""
    if chat is None:
        return ToolCallForm()
    function = {"name": _PROBE_NAME, "arguments": _PROBE_ARGUMENTS}
    call = {"type": "function", "id": "probe0001", "function": function}
    user = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "b"}
    try:
        asked = chat([user], None, True)
        plain = chat([user, said], None, False)
        whole = chat([user, {"role": "assistant", "content": "", "tool_calls": [call]}], None, False)
    except InputError:
        return ToolCallForm()
    ending = plain[len(asked) + 1 :]
    if not (whole.startswith(asked) and plain.startswith(f"{asked}b") and _PROBE_NAME in whole):
        return ToolCallForm()
    written = whole[len(asked) :]
    for start, stop, value in _objects(written):
        key = next((key for key in ("arguments", "parameters") if isinstance(value.get(key), dict)), None)
        if value.get("name") == _PROBE_NAME and key is not None:
            suffix = written[stop:]
            return ToolCallForm(written[:start], suffix.partition(ending)[0] if ending.strip() else suffix, key)
    return ToolCallForm()


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Give all JSON objects in a text that are not inside another, with their places."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, stop = decoder.raw_decode(text, start)
        except ValueError:
            stop = start + 1
        else:
            yield start, stop, value
        start = text.find("{", stop)


@dataclass(frozen=True)
class ParsedReply:
    """A reply taken apart. failed: what looks like a call and cannot be read, as it was written."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def parse_reply(text: str, tool_names: Sequence[str]) -> ParsedReply:
    """Read the tool calls in a reply; new ids are made for them.

    Known forms: <tool_call> JSON </tool_call>, <function=name> with JSON or <parameter=…> elements, [TOOL_CALLS],
    <|python_tag|>, and a reply that is nothing but the JSON of a call of one of `tool_names`, fenced or not.
    """
    calls: list[ToolCall] = []
    failed: list[str] = []
    outside, done = [], 0
    for match in _WRAPPED.finditer(text):
        outside.append(text[done : match.start()])
        done = match.end()
        found = _calls_in(match)
        calls += found
        if not found:
            failed.append(match.group(0).strip())
    outside.append(text[done:])
    if done:
        return ParsedReply("\n".join(part.strip() for part in outside if part.strip()), calls, failed)
    fenced = _FENCE.match(text.strip())
    bare = list(_calls(fenced.group("body") if fenced else text))
    if bare and all(call.name in tool_names for call in bare):
        return ParsedReply("", bare)
    return ParsedReply(text.strip())


def _calls_in(match: re.Match[str]) -> list[ToolCall]:
    if match["name"] is not None:
        return list(_function(match["name"], match["arguments"]))
    body = match["json"] if match["json"] is not None else match["rest"]
    function = _FUNCTION.search(body)
    if function is not None:
        return list(_function(function["name"], function["arguments"]))
    named = _NAMED.match(body)
    if named is not None:
        return list(_function(named["name"], named["arguments"]))
    return list(_calls(body))


def _function(name: str, body: str) -> Iterator[ToolCall]:
    """Give the call of a named function whose arguments are JSON, or elements one a parameter."""
    parameters = {each["name"]: _value(each["value"].strip()) for each in _PARAMETER.finditer(body)}
    arguments = parameters or (_loaded(body) if body.strip() else {})
    if isinstance(arguments, dict):
        yield _call(name, arguments)


def _calls(text: str) -> Iterator[ToolCall]:
    """Give the calls that a text of JSON names: an object, a list of them, or several one after another."""
    value = _loaded(text)
    values = value if isinstance(value, list) else [value]
    if value is None:
        values = _several(text)
    for each in values:
        if not isinstance(each, dict):
            continue
        inner = each.get("function")
        named = inner if isinstance(inner, dict) else each
        name = named.get("name") or (inner if isinstance(inner, str) else None)
        arguments: Any = next((named[key] for key in ("arguments", "parameters", "args") if key in named), {})
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            yield _call(name, arguments)


def _several(text: str) -> list[Any]:
    """Return objects of JSON that stand one after another; none where anything but commas is between them."""
    objects = list(_objects(text))
    edges = [0, *(edge for start, stop, _ in objects for edge in (start, stop)), len(text)]
    between = "".join(text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True))
    return [] if between.strip(" \n\t,;") else [value for _, _, value in objects]


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=uuid.uuid4().hex[:_ID_LENGTH])


def _loaded(text: str) -> Any:
    """Read JSON, or what small models write for it: Python's literals. None where it is neither."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def _value(text: str) -> Any:
    """Read one parameter's value: JSON where it is some, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class VisibleText:
    """A reply's text as it may be shown while it comes: nothing of what is, or may become, a tool call."""

    def __init__(self, form: ToolCallForm, *, watching: bool) -> None:
        """watching: whether there are tools, so that calls may come."""
        opener = form.prefix.strip()
        self._openers = (*_OPENERS, *([opener] if opener else ())) if watching else ()
        self._bare = _BARE_OPENERS if watching else ()
        self._text = ""
        self._shown = ""

    def add(self, piece: str) -> str:
        """Take a piece; return the text that is now certain to be no call."""
        self._text += piece
        if self._bare and self._text.lstrip().startswith(self._bare):
            return ""
        if self._bare and "```".startswith(self._text.strip()):
            return ""
        certain = self._text
        for opener in self._openers:
            certain = certain.partition(opener)[0]
        for opener in self._openers:
            length = max((n for n in range(1, len(opener)) if certain.endswith(opener[:n])), default=0)
            certain = certain[: len(certain) - length]
        certain = certain.rstrip() if self._openers else certain
        piece, self._shown = certain[len(self._shown) :], certain
        return piece

    def finish(self, content: str) -> str:
        """Return what is missing of the reply's final content."""
        return content[len(self._shown) :] if content.startswith(self._shown) else ""
