"""Agent of smolagents on the openai package and on litellm, plain and streamed: `smolagents_agent.py BASE_URL
MODEL`."""

import json
import sys
from typing import Any

from smolagents import LiteLLMModel, OpenAIModel, ToolCallingAgent, tool


@tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails.

    Args:
    query: words to find.
    """
    return f"Ada wrote about {query}"


def solve(base_url: str, model: str, *, stream: bool, on_litellm: bool) -> dict[str, Any]:
    served: Any
    how: dict[str, Any] = {"api_base": base_url, "api_key": "none", "tool_choice": "auto"}  # smolagents would force one
    served = LiteLLMModel(model_id=f"openai/{model}", **how) if on_litellm else OpenAIModel(model_id=model, **how)
    agent = ToolCallingAgent(tools=[search], model=served, max_steps=4, verbosity_level=0, stream_outputs=stream)
    answer = agent.run("Who wrote about the invoice?")
    return {"answer": str(answer), "calls": len(agent.memory.steps) - 1}


WAYS = [(stream, on_litellm) for on_litellm in (False, True) for stream in (False, True)]
print("\n" + json.dumps([solve(*sys.argv[1:3], stream=stream, on_litellm=on_litellm) for stream, on_litellm in WAYS]))
