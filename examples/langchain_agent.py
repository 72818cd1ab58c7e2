"""A LangChain agent reads a report page by page and takes notes, in a memory that the whole would not fit into.

python examples/langchain_agent.py [MODEL]
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool, tool

from langchain_agentcompact import ChatAgentCompact, LatentCompactionMiddleware

PAGES = 4


def pages() -> Iterator[str]:
    """Give the report in pages of two paragraphs."""
    text = (Path(__file__).parent / "harbour_audit.txt").read_text(encoding="utf-8")
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    return ("\n\n".join(paragraphs[n : n + 2]) for n in range(0, len(paragraphs), 2))


def tools() -> list[BaseTool]:
    """The agent's two tools; they remember the page they are at, and the notes."""
    left, notes = pages(), list[str]()

    @tool
    def next_page() -> str:
        """Read the next page of the report."""
        return next(left, "There are no more pages.")

    @tool
    def write_note(finding: str) -> str:
        """Write down what the page says."""
        notes.append(finding)
        return f"note {len(notes)} is written"

    return [next_page, write_note]


class OneAfterTheOther(AgentMiddleware[Any, Any]):
    """Says which tool comes next, so that even a model of 135M parameters, which would rather talk, does the work."""

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        done = sum(isinstance(message, ToolMessage) for message in request.messages)
        choice = ("next_page", "write_note")[done % 2] if done < 2 * PAGES else "none"
        return handler(request.override(tool_choice=choice))


def main(model_name: str = "smollm2") -> None:
    model = ChatAgentCompact(model=model_name, window=700, max_tokens=60, max_string_length=60)
    memory = LatentCompactionMiddleware(trigger=("fraction", 0.8), keep=("messages", 4), strategy="two_pass")
    agent = create_agent(
        model,
        tools=tools(),
        system_prompt="You read a report about a harbour and write a note on each page.",
        middleware=[memory, OneAfterTheOther()],
    )
    task = "Read the report page by page, with a note on each. Then say in one sentence what it is about."
    result = agent.invoke({"messages": [("user", task)]}, {"recursion_limit": 20 * PAGES})
    read = 0
    for message in result["messages"]:
        if isinstance(message, AIMessage):
            found, usage = message.response_metadata["agentcompact"], message.usage_metadata
            read += found["prefilled"]
            calls = ", ".join(f"{call['name']}({call['args'].get('finding', '')})" for call in message.tool_calls)
            print(
                f"{usage['input_tokens'] if usage else 0:5} tokens in {found['held_positions']:4.0f} positions: {calls}"
            )
            for report in found["compactions"]:
                print(f"      compacted {report['tokens']} tokens into {report['budget']} entries per head")
    print(f"{read} tokens were read for the conversation, none twice.")
    print(result["messages"][-1].text)


if __name__ == "__main__":
    main(*sys.argv[1:2])
