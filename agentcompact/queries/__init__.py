"""Reference queries: what the compacted cache must still answer as the full cache did."""

from agentcompact.queries.context_prefill import context_prefill_queries
from agentcompact.queries.mix import ReferenceQueries, reference_queries, reference_turns
from agentcompact.queries.repeat_prefill import repeat_prefill_queries
from agentcompact.queries.self_study import Study, self_study_queries

__all__ = [
    "ReferenceQueries",
    "Study",
    "context_prefill_queries",
    "reference_queries",
    "reference_turns",
    "repeat_prefill_queries",
    "self_study_queries",
]
