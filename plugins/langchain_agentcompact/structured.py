"""Forced tool choices and answers that match a schema."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from agentcompact.errors import InputError, SettingsError

Method = Literal["json_schema", "function_calling", "json_mode"]
REQUIRED = "required"
"""The choice of any one tool."""


def tool_choice_of(choice: Any, names: Sequence[str]) -> str | None:
    """Return "auto", "none", "required", a tool's name, or None where no choice is made.

    Raises InputError for a tool that is not among the tools, or a forced call without any.
    """
    if isinstance(choice, dict):
        choice = choice.get("name") or choice.get("function", {}).get("name") or choice.get("type")
    if choice is None or choice is False:
        return None
    if choice in ("auto", "none"):
        return str(choice)
    if not names:
        raise InputError(f"tool_choice '{choice}' needs tools: bind them with it")
    if choice is True or choice in ("any", REQUIRED):
        return REQUIRED
    if choice not in names:
        raise InputError(f"tool_choice '{choice}' is none of the tools ({', '.join(names)}), auto, any or none")
    return str(choice)


def structured_output(
    model: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, method: Method, **kwargs: Any
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """Return a model with a parser of its answers; see `ChatAgentCompact.with_structured_output`."""
    is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    described = {"kwargs": {"method": method}, "schema": convert_to_openai_tool(schema)}
    parser: OutputParserLike[Any]
    if method == "function_calling":
        name = described["schema"]["function"]["name"]
        bound = model.bind_tools([schema], tool_choice=name, ls_structured_output_format=described, **kwargs)
        parser = (
            PydanticToolsParser(tools=[cast("type[BaseModel]", schema)], first_tool_only=True)
            if is_pydantic
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
    elif method in ("json_schema", "json_mode"):
        form = {"type": "json_schema", "json_schema": {"schema": convert_to_json_schema(schema)}}
        bound = cast(
            "Runnable[LanguageModelInput, Any]",
            model.bind(response_format=form, ls_structured_output_format=described, **kwargs),
        )
        parser = (
            PydanticOutputParser(pydantic_object=cast("type[BaseModel]", schema)) if is_pydantic else JsonOutputParser()
        )
    else:
        raise SettingsError(f"method '{method}' is none of json_schema, function_calling, json_mode")
    if not include_raw:
        return cast("Runnable[LanguageModelInput, dict[str, Any] | BaseModel]", bound | parser)
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return cast(
        "Runnable[LanguageModelInput, dict[str, Any] | BaseModel]",
        RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error"),
    )
