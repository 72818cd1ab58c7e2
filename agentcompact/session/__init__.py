"""Conversations: messages become token ids in a cache, and a memory manager keeps that within its window."""

from agentcompact.session.compaction import CompactionReport, FidelityError
from agentcompact.session.fidelity import Fidelity
from agentcompact.session.journal import Journal, holder_of, read_events
from agentcompact.session.manager import VetoError
from agentcompact.session.messages import Message, ToolCall, as_message
from agentcompact.session.planning import CompactionPlan
from agentcompact.session.policy import SessionPolicy, read_bound, read_policy
from agentcompact.session.session import Reply, Session
from agentcompact.session.state import SessionState, replay
from agentcompact.session.status import MessageStatus, SessionStatus

__all__ = [
    "CompactionPlan",
    "CompactionReport",
    "Fidelity",
    "FidelityError",
    "Journal",
    "Message",
    "MessageStatus",
    "Reply",
    "Session",
    "SessionPolicy",
    "SessionState",
    "SessionStatus",
    "ToolCall",
    "VetoError",
    "as_message",
    "holder_of",
    "read_bound",
    "read_events",
    "read_policy",
    "replay",
]
