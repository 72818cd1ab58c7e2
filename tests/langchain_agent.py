"""An agent of a tiny model with a checkpointer, run in a process of its own; holds no tests itself.

    python langchain_agent.py DATABASE SNAPSHOTS MESSAGE...

Says the messages in one thread and prints, as JSON, each reply's content and what its memory did.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.sqlite import SqliteSaver
from tiny import TOOLS, chat_model

from langchain_agentcompact import ChatAgentCompact, LatentCompactionMiddleware, register_model

THREAD: dict[str, Any] = {"configurable": {"thread_id": "one"}}


def talk(database: str, snapshots: str, messages: list[str]) -> list[dict[str, Any]]:
    """Say messages to an agent that holds nothing in memory yet."""
    register_model("tiny-process", chat_model(template=TOOLS))
    model = ChatAgentCompact(
        model="tiny-process", max_tokens=12, window=400, snapshot_dir=snapshots, policy={"min_span": 8}
    )
    middleware = LatentCompactionMiddleware(trigger=("tokens", 300), keep=("messages", 2), strategy="two_pass")
    replies = []
    with SqliteSaver.from_conn_string(database) as saver:
        agent = create_agent(model, tools=[], middleware=[middleware], checkpointer=saver)
        for text in messages:
            reply = agent.invoke({"messages": [{"role": "user", "content": text}]}, THREAD)["messages"][-1]
            found = reply.response_metadata["agentcompact"]
            replies.append({**found, "content": reply.content, "prompt": reply.usage_metadata["input_tokens"]})
    return replies


if __name__ == "__main__":
    print(json.dumps(talk(sys.argv[1], sys.argv[2], sys.argv[3:])))
