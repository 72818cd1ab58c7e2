"""What one call asks for beside its messages: tools, a forced choice, a schema, other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcompact.errors import InputError, SettingsError
from agentcompact.settings import suggestion
from langchain_agentcompact.messages import read_tools
from langchain_agentcompact.snapshots import SnapshotHandle, read_handle
from langchain_agentcompact.structured import REQUIRED, tool_choice_of

if TYPE_CHECKING:
    from langchain_agentcompact.registry import SharedModel

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_IGNORED = frozenset({"parallel_tool_calls", "strict", "stream", "ls_structured_output_format", "stream_usage"})
"""What LangChain hands to every model."""
_KINDS = ("tokens", "fraction", "messages")
_TAKEN = (*_SAMPLING, "model", "tools", "tool_choice", "response_format", "compaction")


@dataclass(frozen=True)
class Asked:
    """What an answer must match. forces_call: whether that is a tool call's JSON."""

    schema: dict[str, Any] | None = None
    forces_call: bool = False


@dataclass(frozen=True)
class CallSettings:
    """The keyword arguments of one call. policy: settings of `SessionPolicy` that win over the model's."""

    model: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    resume: SnapshotHandle | None = None
    keeps_snapshot: bool = False

    def asked(self, shared: SharedModel, string_length: int) -> Asked:
        """Return the schema that the answer must match, if any; with tools it may be a call of one instead."""
        forced = self.tool_choice not in (None, "auto", "none")
        if not forced and self.response_format is None:
            return Asked()
        try:
            from langchain_agentcompact.constraint import answer_schema, call_schema, either
        except ImportError as error:
            raise InputError(
                "a forced tool choice and a schema need llguidance: pip install 'agentcompact[langchain]'"
            ) from error
        if self.response_format is not None and not forced:
            answer = answer_schema(self.response_format, string_length)
            if not self.tools or self.tool_choice == "none":
                return Asked(answer)
            calls = call_schema(self.tools, shared.form.arguments_key, string_length)
            return Asked(either(calls, answer))
        tools = [t for t in self.tools if self.tool_choice in (REQUIRED, t["function"]["name"])]
        return Asked(call_schema(tools, shared.form.arguments_key, string_length), forces_call=True)


def read_call(kwargs: Mapping[str, Any]) -> CallSettings:
    """Read the keyword arguments of a call. Raises SettingsError for one that does not exist."""
    for name in kwargs:
        if name not in _TAKEN and name not in _IGNORED:
            raise SettingsError(
                f"a call takes no '{name}'{suggestion(name, _TAKEN)}; it takes: {', '.join(sorted(_TAKEN))}"
            )
    tools = read_tools(kwargs.get("tools") or ())
    names = [tool["function"]["name"] for tool in tools]
    compaction = dict(kwargs.get("compaction") or {})
    return CallSettings(
        model=kwargs.get("model"),
        tools=tools,
        tool_choice=tool_choice_of(kwargs.get("tool_choice"), names),
        response_format=kwargs.get("response_format"),
        sampling={name: kwargs[name] for name in _SAMPLING if kwargs.get(name) is not None},
        policy=policy_values(**compaction.get("policy", {})),
        resume=read_handle(compaction.get("resume")),
        keeps_snapshot=bool(compaction.get("keep_snapshot", False)),
    )


def policy_values(**values: Any) -> dict[str, Any]:
    """Return settings of `SessionPolicy`, with triggers written as SummarizationMiddleware takes them.

    A dictionary {"tokens": 4000, "messages": 10} asks for all of its bounds, a list for any.
    """
    trigger = values.get("trigger")
    for bound in (trigger, values.get("keep")):
        if isinstance(bound, tuple) and len(bound) == 2 and isinstance(bound[0], str) and bound[0] not in _KINDS:
            raise SettingsError(f"'{bound[0]}' is none of {', '.join(_KINDS)}: give a bound like ('tokens', 6000)")
    if isinstance(trigger, list):
        single = [isinstance(each, Mapping) and len(each) == 1 for each in trigger]
        clauses = [next(iter(each.items())) if one else each for each, one in zip(trigger, single, strict=True)]
        if any(isinstance(each, Mapping) for each in clauses):
            raise SettingsError("a list of triggers takes one bound each: give a single {…} where all must hold")
        return {**values, "trigger": [tuple(each) if isinstance(each, list) else each for each in clauses]}
    if isinstance(trigger, Mapping):
        return {**values, "trigger": list(trigger.items()), "trigger_when": "all"}
    return dict(values)
