"""agentcompact for LangChain: a local chat model whose memory is compacted in latent space, and a middleware."""

from langchain_agentcompact.chat_model import ChatAgentCompact
from langchain_agentcompact.middleware import LatentCompactionMiddleware
from langchain_agentcompact.registry import register_model, unload_model

__all__ = ["ChatAgentCompact", "LatentCompactionMiddleware", "register_model", "unload_model"]
