"""agno's agent, streamed, on chat completions or Responses."""

import sys
from typing import Any

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses


def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


model_class: Any = OpenAIResponses if sys.argv[3] == "responses" else OpenAIChat
model = model_class(id="gpt-5", base_url=f"{sys.argv[1]}/v1", api_key="none")
agent = Agent(model=model, tools=[search], instructions="You search.", telemetry=False)
events: Any = agent.run(sys.argv[2], stream=True)
print("".join(getattr(event, "content", None) or "" for event in events))
