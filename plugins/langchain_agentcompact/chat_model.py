"""A LangChain chat model over a local model that keeps its KV cache between calls, and compacts it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentcompact.errors import SettingsError
from agentcompact.session.policy import SessionPolicy, read_policy
from agentcompact.session.replying import OnText
from agentcompact.settings import SamplingSettings, build_settings, suggestion
from langchain_agentcompact.call_settings import CallSettings, policy_values, read_call
from langchain_agentcompact.messages import read_messages, read_tools
from langchain_agentcompact.outputs import (
    PROVIDER,
    call_chunks,
    generation_of,
    last_chunk,
    tell_compaction,
    text_chunk,
)
from langchain_agentcompact.registry import SharedModel, shared_model
from langchain_agentcompact.snapshots import SnapshotStore
from langchain_agentcompact.streaming import TurnStream
from langchain_agentcompact.structured import structured_output, tool_choice_of
from langchain_agentcompact.turns import Answer, OnCompaction, Turn

_ELSEWHERE = frozenset({"timeout", "max_retries", "api_key", "base_url"})
"""Parameters of models behind a network, which mean nothing here."""


class ChatAgentCompact(BaseChatModel):
    """A chat model that runs in this process, compacts its memory by itself, and reads no token twice.

        >>> model = ChatAgentCompact(model="smollm2", strategy="two_pass", trigger=("fraction", 0.8))
        >>> model.invoke("Hello").content

    Weights are loaded on first use, once a process, whatever the number of instances; calls of one model wait for each
    other. Raises SettingsError for a parameter or a value that does not exist, when it is made; ContextOverflowError
    where a conversation cannot be brought down to the window; InputError for a message that it cannot read.
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field("smollm2", alias="model", description="alias, folder, .gguf file, hub id, registered name")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: str = Field("auto", description='"float32", "bfloat16", "float16", or "auto": float32 on the CPU')
    device: str = Field("auto", description='"cpu", "cuda:0", …, or "auto": the GPU if there is one')

    max_tokens: int = Field(512, ge=1, description="tokens of a reply at most")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens up to this mass")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    seed: int | None = Field(None, ge=0, description="of sampling; None draws anew in each call")
    stop: list[str] | None = Field(None, description="a reply ends before the first of these strings in it")
    streaming: bool = Field(False, description="whether `invoke` streams to callbacks")

    auto: bool = Field(True, description="compact by itself at the trigger")
    window: int | None = Field(None, description="held positions at most; default: the model's context")
    trigger: Any = Field(("fraction", 0.8), description="when to compact; (kind, size), or a list of which any will do")
    keep: Any = Field(("messages", 6), description="how much of the end stays as it is")
    strategy: str = Field("attention_matching", description="see `agentcompact strategies`")
    strategy_settings: dict[str, Any] = Field(default_factory=dict, description="the strategy's settings")
    ratio: float = Field(4.0, description="logical tokens for each entry kept")
    policy: dict[str, Any] = Field(default_factory=dict, description="other settings of `SessionPolicy`, by name")

    max_states: int = Field(16, ge=1, description="conversations held in memory; as many again on disk")
    pool_bytes: int = Field(2**31, ge=0, description="bytes of conversations held in memory, the current one excepted")
    max_string_length: int = Field(512, ge=1, description="characters of strings that a schema leaves unbounded")
    snapshot_dir: str | None = Field(None, description="folder of snapshots for checkpointers; default: user's cache")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            names = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
            for name in values:
                if name not in names | _ELSEWHERE:
                    raise SettingsError(f"ChatAgentCompact has no parameter '{name}'{suggestion(str(name), names)}")
        return values

    @model_validator(mode="after")
    def _reads(self) -> ChatAgentCompact:
        self.session_policy()
        self._sampling({}, None)
        return self

    # What it is

    @property
    def model(self) -> str:
        """The model's name."""
        return self.model_name

    @property
    def _llm_type(self) -> str:
        return "chat-agentcompact"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: the model, how it samples, and how it compacts."""
        return {
            "model": self.model_name,
            "revision": self.revision,
            "dtype": self.dtype,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "policy": self.session_policy().model_dump(mode="json", exclude={"snapshot_bytes"}),
        }

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        return {"model_name": self.model_name}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_name=kwargs.get("model") or self.model_name,
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        stops = stop or self.stop
        if stops:
            params["ls_stop"] = stops
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            max_output_tokens=self.max_tokens,
        )
        longest = self._shared().longest_context()
        if longest is not None:
            profile["max_input_tokens"] = self.session_policy().window_of(longest)
        return profile

    def session_policy(self, **changes: Any) -> SessionPolicy:
        """Return when and how this model compacts. changes: settings of `SessionPolicy` that win over its own.

        Raises SettingsError for what makes no sense.
        """
        own = {"second_strategy": "streaming_llm", **self.policy}
        named = policy_values(
            auto=self.auto,
            window=self.window,
            trigger=self.trigger,
            keep=self.keep,
            strategy=self.strategy,
            settings=self.strategy_settings,
            ratio=self.ratio,
        )
        return read_policy(None, **{**own, **named, **changes})

    # Counting

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a plain text, nothing added."""
        return self._shared().engine.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the tokens of the prompt that these messages and tools make, the reply's beginning included."""
        if not messages:
            return 0
        shared = self._shared()
        read, tool_schemas = read_messages(messages), read_tools(tools or ())
        with shared.lock:
            return shared.runner.count(read, tool_schemas)

    # Answering

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = read_call(kwargs)
        turn = self._turn(messages, stop, call)
        answer = self._run(turn, call)
        for report in answer.reports:  # without the lock, since a callback may ask the model something
            tell_compaction(run_manager, report)
        return ChatResult(generations=[generation_of(answer, self._named(call))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = read_call(kwargs)
        turn = self._turn(messages, stop, call)
        stream = TurnStream(lambda on_text, on_compaction: self._run(turn, call, on_text, on_compaction))
        for event in stream.events():
            if isinstance(event, str):
                chunks = [text_chunk(event)]
            elif isinstance(event, Answer):
                chunks = [*call_chunks(event), last_chunk(event, self._named(call))]
            else:
                tell_compaction(run_manager, event)
                chunks = []
            for chunk in chunks:
                if run_manager is not None:
                    run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                yield chunk

    def _run(
        self, turn: Turn, call: CallSettings, on_text: OnText | None = None, told: OnCompaction | None = None
    ) -> Answer:
        shared = self._shared(call.model)
        with shared.lock:
            return shared.runner.run(turn, on_text, told)

    def _turn(self, messages: list[BaseMessage], stop: list[str] | None, call: CallSettings) -> Turn:
        shared = self._shared(call.model)
        asked = call.asked(shared, self.max_string_length)
        return Turn(
            messages=read_messages(messages),
            tools=call.tools,
            policy=self.session_policy(**call.policy),
            sampling=self._sampling(call.sampling, stop),
            schema=asked.schema,
            forces_call=asked.forces_call,
            reads_calls=bool(call.tools) and call.tool_choice != "none" and not asked.forces_call,
            forbids_calls=bool(call.tools) and call.tool_choice == "none" and asked.schema is None,
            resume=call.resume,
            store=self._store if call.keeps_snapshot else None,
            keeps_snapshot=call.keeps_snapshot,
            max_states=self.max_states,
            pool_bytes=self.pool_bytes,
        )

    def _sampling(self, changes: Mapping[str, Any], stop: list[str] | None) -> SamplingSettings:
        seed = changes.get("seed", self.seed)
        values = {
            "max_new_tokens": changes.get("max_tokens", self.max_tokens),
            "temperature": changes.get("temperature", self.temperature),
            "top_p": changes.get("top_p", self.top_p),
            "top_k": changes.get("top_k", self.top_k),
            "seed": secrets.randbits(62) if seed is None else seed,
            "stop": tuple(each for each in (self.stop if stop is None else stop) or () if each),
        }
        return build_settings(SamplingSettings, values, "ChatAgentCompact")

    def _shared(self, model: str | None = None) -> SharedModel:
        return shared_model(model or self.model_name, None if model else self.revision, self.dtype, self.device)

    def _named(self, call: CallSettings) -> str:
        return call.model or self.model_name

    @cached_property
    def _store(self) -> SnapshotStore:
        return SnapshotStore(None if self.snapshot_dir is None else Path(self.snapshot_dir).expanduser())

    # Tools and structure

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools.

        tool_choice: "auto" (the default), "any" or "required" (one of the tools is called), "none" (the reply is
        text), or a tool's name. A forced call always is one call whose arguments match the tool's schema.
        """
        schemas = read_tools(tools)
        choice = tool_choice_of(tool_choice, [tool["function"]["name"] for tool in schemas])
        bound = self.bind(tools=schemas, tool_choice=choice, **kwargs)
        return cast("Runnable[LanguageModelInput, AIMessage]", bound)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return the model with answers that match a schema: pydantic class, typed dict, JSON schema or tool schema.

        Answers are complete and match the schema by construction, whatever the method ("json_mode" is "json_schema").
        strict: for other providers; answers always are. include_raw: give {"raw", "parsed", "parsing_error"}.
        """
        return structured_output(self, schema, include_raw=include_raw, method=method, **kwargs)
