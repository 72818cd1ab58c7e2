"""Reference queries: what the compacted cache must still answer as the full cache did."""

from agentcompact.queries.context_prefill import context_prefill_queries
from agentcompact.queries.repeat_prefill import repeat_prefill_queries

__all__ = ["context_prefill_queries", "repeat_prefill_queries"]
