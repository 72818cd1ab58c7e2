"""The compacted cache, attention over it, and its file format."""

from agentcompact.cache.attention import attend, register_attention
from agentcompact.cache.captured import CapturedQueries
from agentcompact.cache.compacted import CompactedCache
from agentcompact.cache.file import load_cache, read_header, save_cache
from agentcompact.cache.layers import ATTENTION_NAME, FullLayer, SlidingLayer
from agentcompact.cache.metadata import CacheMetadata, PromptFormat, Report
from agentcompact.cache.span import Span, join_spans

__all__ = [
    "ATTENTION_NAME",
    "CacheMetadata",
    "CapturedQueries",
    "CompactedCache",
    "FullLayer",
    "PromptFormat",
    "Report",
    "SlidingLayer",
    "Span",
    "attend",
    "join_spans",
    "load_cache",
    "read_header",
    "register_attention",
    "save_cache",
]
