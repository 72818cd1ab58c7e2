"""recent: the latest entries, which is what cutting the front off keeps."""

from __future__ import annotations

from pydantic import Field

from agentcompact.strategies.eviction import EvictionSettings
from agentcompact.strategies.streaming_llm import StreamingLLM


class RecentSettings(EvictionSettings):
    sinks: int = Field(0, ge=0, description="first entries that are always kept, at most the budget")


class Recent(StreamingLLM):
    """Keeps the last entries of each head; StreamingLLM without sinks."""

    name = "recent"
    summary = "the most recent entries only; needs no queries, forgets the beginning"
    settings_type = RecentSettings
