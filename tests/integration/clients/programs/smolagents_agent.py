"""A smolagents agent: `smolagents_agent.py BASE_URL MODEL [stream] [litellm]`; on the openai package, or on litellm."""

import json
import sys
from typing import Any

from smolagents import LiteLLMModel, OpenAIModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Finds mails.

    Args:
        query: What to look for.
    """
    return f"Ada wrote about {query}"


def main(base_url: str, model: str, *, stream: bool, on_litellm: bool) -> None:
    served: Any
    if on_litellm:
        served = LiteLLMModel(model_id=f"openai/{model}", api_base=base_url, api_key="none")
    else:
        served = OpenAIModel(model_id=model, api_base=base_url, api_key="none")
    agent = ToolCallingAgent(tools=[search], model=served, max_steps=4, verbosity_level=0, stream_outputs=stream)
    answer = agent.run("Who wrote about the invoice?")
    print(json.dumps({"answer": str(answer), "calls": len(agent.memory.steps) - 1}))


main(sys.argv[1], sys.argv[2], stream="stream" in sys.argv[3:], on_litellm="litellm" in sys.argv[3:])
