"""Answers that cannot but match a JSON schema, and are complete before their last token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from langchain_core.utils.json_schema import dereference_refs
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from agentcompact.errors import ContextLengthError, InputError

_CLOSERS = ("}", "]", '"', "0")
"""What brings JSON nearer to its end outside of strings, tried in this order."""
_INSIDE = ('"', "a")
"""The same inside of strings, where a letter may stand."""
_COMPACT: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
_MAPS = ("properties", "$defs", "definitions", "patternProperties")
"""Keys whose values are schemas by name."""
_VALUES = ("enum", "const", "default", "examples", "required")
"""Keys whose values are no schemas."""
_UNBOUNDED = ("maxLength", "enum", "const", "pattern", "format")


class JsonConstraint:
    """Lets a decode loop choose only tokens that keep to a JSON schema and leave room to close it.

    After each token the shortest way to a complete value is known; a token after which that no longer fits is replaced
    by the first of that way, which is then followed to its end.
    """

    def __init__(self, tokenizer: LLTokenizer, schema: Mapping[str, Any], tokens: int) -> None:
        """tokens: of the whole answer, its end token included.

        Raises InputError for a schema that cannot be followed, ContextLengthError where its shortest value does not
        fit.
        """
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPACT)
        self._matcher = LLMatcher(tokenizer, grammar)
        if self._matcher.is_error():
            raise InputError(f"the schema cannot be followed: {' '.join(self._matcher.get_error().split())[:300]}")
        self._ends = frozenset(tokenizer.eos_tokens)
        self._closers = [tokenizer.tokenize_str(closer)[0] for closer in _CLOSERS]
        self._inside = [tokenizer.tokenize_str(closer)[0] for closer in _INSIDE]
        self._left = tokens - 1
        closing = self._way_to_end(self._matcher, self._left)
        if closing is None:
            raise ContextLengthError(f"an answer of {tokens:,} tokens cannot hold this schema: raise max_tokens")
        self._closing = closing
        self._is_closing = False

    def allow(self, logits: Tensor) -> Tensor:
        if self._is_closing:
            return logits  # `take` says what comes
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: logits.shape[-1]].astype(bool))
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def take(self, token: int) -> int:
        if not self._closing and token in self._ends:
            return token
        if not self._is_closing:
            after = self._matcher.deep_copy()
            closing = self._way_to_end(after, self._left - 1) if after.consume_token(token) else None
            if closing is not None:
                self._matcher, self._closing, self._left = after, closing, self._left - 1
                return token
            self._is_closing = True
        if not self._closing:
            return min(self._ends)
        return self._closing.pop(0)

    def _way_to_end(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Return the tokens of a short way to a complete value; None where it takes more than `most`."""
        ahead, way = matcher.deep_copy(), list[int]()
        while not ahead.is_accepting():
            step = ahead.compute_ff_tokens() or [self._closest(ahead.compute_bitmask())]
            way += step
            if len(way) > most or not ahead.consume_tokens(step):
                return None
        return way if len(way) <= most else None

    def _closest(self, mask: bytes) -> int:
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        for token in self._inside if bits[self._inside[-1]] else self._closers:
            if bits[token]:
                return token
        bits[sorted(self._ends)] = 0
        return int(bits.argmax())


def bounded(schema: Any, string_length: int) -> Any:
    """Return a schema whose strings have a length bound and whose objects take no keys that it does not name.

    string_length: characters of each string that has no bound, pattern, format or list of values.
    """
    if isinstance(schema, list):
        return [bounded(each, string_length) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: bounded(each, string_length) for name, each in value.items()}
        else:
            made[key] = value if key in _VALUES else bounded(value, string_length)
    kinds = made.get("type")
    if "string" in (kinds if isinstance(kinds, list) else [kinds]) and not any(key in made for key in _UNBOUNDED):
        made["maxLength"] = string_length
    if isinstance(made.get("properties"), dict) and kinds == "object":
        made.setdefault("additionalProperties", False)
    return made


def call_schema(tools: Sequence[dict[str, Any]], arguments_key: str, string_length: int) -> dict[str, Any]:
    """Return the schema of one call of any of these tools, as {"name": …, arguments_key: {…}}."""
    forms = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        arguments = bounded(dereference_refs(parameters), string_length)
        forms.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, arguments_key: arguments},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def answer_schema(response_format: Mapping[str, Any], string_length: int) -> dict[str, Any]:
    """Return the schema of a `response_format`: {"type": "json_object"}, {"type": "json_schema", …}, or a schema.

    Raises InputError for what is none of these.
    """
    kind = response_format.get("type")
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InputError('response_format has no schema: give {"json_schema": {"schema": {…}}}')
        response_format = schema
    made: dict[str, Any] = bounded(dict(response_format), string_length)
    return made


def either(calls: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call or an answer."""
    definitions: dict[str, Any] = {key: answer[key] for key in ("$defs", "definitions") if key in answer}
    rest = {key: value for key, value in answer.items() if key not in definitions}
    return {"anyOf": [*calls.get("anyOf", [calls]), rest], **definitions}
