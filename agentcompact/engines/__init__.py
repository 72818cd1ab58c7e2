"""Engines: they run a model over a cache."""

from agentcompact.engines.base import (
    CAPTURES_QUERIES,
    GIVES_GRADIENTS,
    ROTATES_STATES,
    Engine,
    EngineCounters,
    Generation,
    Progress,
    TokenConstraint,
)
from agentcompact.engines.prompt_batch import PromptBatch
from agentcompact.engines.prompts import question_ids
from agentcompact.engines.transformers_engine import TransformersEngine

__all__ = [
    "CAPTURES_QUERIES",
    "GIVES_GRADIENTS",
    "ROTATES_STATES",
    "Engine",
    "EngineCounters",
    "Generation",
    "Progress",
    "PromptBatch",
    "TokenConstraint",
    "TransformersEngine",
    "question_ids",
]
