"""Answers as LangChain's messages and chunks."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.callbacks.manager import handle_event
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk

from agentcompact.session.compaction import CompactionReport
from langchain_agentcompact.turns import Answer

PROVIDER = "agentcompact"
COMPACTION_EVENT = "agentcompact_compaction"
"""Name of the custom event that callbacks get for each compaction, with its report."""

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def usage_of(answer: Answer) -> UsageMetadata:
    """Return the tokens: input_tokens is the logical prompt, of which cache_read were not read again."""
    return UsageMetadata(
        input_tokens=answer.prompt_tokens,
        output_tokens=answer.decoded,
        total_tokens=answer.prompt_tokens + answer.decoded,
        input_token_details=InputTokenDetails(
            cache_read=answer.prompt_tokens - answer.prefilled, cache_creation=answer.prefilled
        ),
    )


def metadata_of(answer: Answer, model: str) -> dict[str, Any]:
    """Return `response_metadata`: the finish reason, the model, and under "agentcompact" what the memory did.

    held_positions, entries: what the conversation costs behind the reply. ratio: its logical tokens for each held
    position. prefilled: tokens read. compactions: reports. notes: what a person should know. snapshot: a handle to go
    on from, or None; resumed: the snapshot that this call went on from, or "".
    """
    logical = answer.prompt_tokens + answer.decoded
    return {
        "finish_reason": "tool_calls" if answer.calls else _FINISH_REASONS[answer.finish_reason],
        "model_name": model,
        "model_provider": PROVIDER,
        "agentcompact": {
            "held_positions": answer.held,
            "entries": answer.entries,
            "ratio": logical / max(1.0, answer.held),
            "prefilled": answer.prefilled,
            "compactions": [report.model_dump(mode="json") for report in answer.reports],
            "notes": answer.notes,
            "snapshot": None if answer.handle is None else answer.handle.model_dump(),
            "resumed": answer.resumed,
        },
    }


def generation_of(answer: Answer, model: str) -> ChatGeneration:
    """Return a whole answer."""
    message = AIMessage(
        content=answer.content,
        tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=text, id=None, error="the call is no JSON") for text in answer.failed
        ],
        usage_metadata=usage_of(answer),
        response_metadata=metadata_of(answer, model),
    )
    return ChatGeneration(message=message)


def text_chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def call_chunks(answer: Answer) -> list[ChatGenerationChunk]:
    """Return one chunk a tool call, numbered; those that cannot be read go through as they were written."""
    written = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in answer.calls]
    failed = [(None, text, None) for text in answer.failed]
    return [
        ChatGenerationChunk(
            message=AIMessageChunk(
                content="", tool_call_chunks=[tool_call_chunk(name=name, args=args, id=call_id, index=index)]
            )
        )
        for index, (name, args, call_id) in enumerate([*written, *failed])
    ]


def last_chunk(answer: Answer, model: str) -> ChatGenerationChunk:
    """Return the chunk that ends a stream: the only one with usage and metadata."""
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            usage_metadata=usage_of(answer),
            response_metadata=metadata_of(answer, model),
            chunk_position="last",
        )
    )


def tell_compaction(run_manager: CallbackManagerForLLMRun | None, report: CompactionReport) -> None:
    """Tell the callbacks of a run about a compaction, as a custom event."""
    if run_manager is not None:
        handle_event(
            run_manager.handlers,
            "on_custom_event",
            "ignore_custom_event",
            COMPACTION_EVENT,
            report.model_dump(mode="json"),
            run_id=run_manager.run_id,
            tags=run_manager.tags,
            metadata=run_manager.metadata,
        )
