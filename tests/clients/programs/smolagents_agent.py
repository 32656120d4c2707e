"""smolagents, streamed: the agent that calls tools, or the one that writes code."""

import sys
from typing import Any

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails.

    Args:
        query: words to find.
    """
    return f"Ada wrote about {query}"


model: Any = OpenAIModel(model_id="gpt-4o", api_base=f"{sys.argv[1]}/v1", api_key="none")
kind: Any = {"code": CodeAgent, "tools": ToolCallingAgent}[sys.argv[3]]
print(
    "\n" + str(kind(tools=[search], model=model, max_steps=5, verbosity_level=0, stream_outputs=True).run(sys.argv[2]))
)
