"""Latent compaction inside a LangChain agent: the place of SummarizationMiddleware, without touching messages."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ExtendedModelResponse, PrivateStateAttr
from langchain_core.messages import AIMessage
from langgraph.types import Command
from typing_extensions import NotRequired

from agentcompact.session.policy import read_policy
from langchain_agentcompact.call_settings import policy_values
from langchain_agentcompact.chat_model import ChatAgentCompact

STATE_KEY = "latent_compaction"
"""Where an agent's state keeps the handle of its latest snapshot."""


class LatentCompactionState(AgentState[Any]):
    """An agent's state with the handle of a snapshot: its id, digest, number of messages, and model."""

    latent_compaction: NotRequired[Annotated[dict[str, Any] | None, PrivateStateAttr]]


class LatentCompactionMiddleware(AgentMiddleware[LatentCompactionState, Any, Any]):
    """Compacts the agent's memory in the model, and leaves every message where it is.

        >>> middleware = LatentCompactionMiddleware(trigger=("tokens", 6000), keep=("messages", 8))
        >>> agent = create_agent(ChatAgentCompact(model="smollm2"), tools=[...], middleware=[middleware])

    With a checkpointer the agent's state keeps a handle of the latest snapshot, so that another process goes on from
    it; where the snapshot is gone the conversation is read, and compacted, again. Its settings win over the model's.
    Models other than ChatAgentCompact are called as if it were not there, with a warning.
    """

    state_schema = LatentCompactionState

    def __init__(
        self,
        *,
        trigger: tuple[str, float] | Mapping[str, float] | Sequence[Any] | None = ("fraction", 0.8),
        keep: tuple[str, float] = ("messages", 6),
        strategy: str | None = None,
        strategy_settings: Mapping[str, Any] | None = None,
        ratio: float | None = None,
        **policy: Any,
    ) -> None:
        """trigger, keep: as SummarizationMiddleware takes them, but tokens are held positions, counted by the model.

        The system prompt and the tools count as well, and messages are those not compacted yet. trigger None never
        compacts. strategy, ratio and what `policy` names (see `SessionPolicy`) are the model's own where they are left
        out. Raises SettingsError for a setting or a value that does not exist.
        """
        super().__init__()
        values: dict[str, Any] = {"keep": keep, "auto": trigger is not None, **policy}
        given = {
            "trigger": trigger,
            "strategy": strategy,
            "settings": None if strategy_settings is None else dict(strategy_settings),
            "ratio": ratio,
        }
        values.update({name: value for name, value in given.items() if value is not None})
        if strategy is not None:
            values.setdefault("settings", {})  # the model's are another strategy's
        self.policy = policy_values(**values)
        """Settings of `SessionPolicy` that win over the model's."""
        read_policy(None, **self.policy)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """Hand the policy to the model, and keep the handle of the snapshot it made."""
        prepared = self._prepared(request)
        return handler(request) if prepared is None else _kept(request, handler(prepared))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """Do what `wrap_model_call` does, without blocking."""
        prepared = self._prepared(request)
        return await handler(request) if prepared is None else _kept(request, await handler(prepared))

    def _prepared(self, request: ModelRequest[Any]) -> ModelRequest[Any] | None:
        """Return the request with the policy in its settings; None for a model that would not understand them."""
        if not isinstance(request.model, ChatAgentCompact):
            warnings.warn(
                f"LatentCompactionMiddleware does nothing with {type(request.model).__name__}: use ChatAgentCompact",
                stacklevel=2,
            )
            return None
        compaction = {"policy": self.policy, "resume": request.state.get(STATE_KEY), "keep_snapshot": True}
        return request.override(model_settings={**request.model_settings, "compaction": compaction})


def _kept(request: ModelRequest[Any], response: ModelResponse[Any]) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
    """Return the response, with a state update where the model kept a new snapshot."""
    replies = [message for message in response.result if isinstance(message, AIMessage)]
    made = [reply.response_metadata.get("agentcompact", {}).get("snapshot") for reply in replies]
    handle = next((each for each in reversed(made) if each), None)
    if handle is None or handle == request.state.get(STATE_KEY):
        return response
    return ExtendedModelResponse(model_response=response, command=Command(update={STATE_KEY: handle}))
