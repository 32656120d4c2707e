"""Strands' agent, streamed, on chat completions or Responses."""

import sys
from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


@tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


model_class: Any = OpenAIResponsesModel if sys.argv[3] == "responses" else OpenAIModel
model = model_class(client_args={"api_key": "none", "base_url": f"{sys.argv[1]}/v1"}, model_id="gpt-5")
agent = Agent(model=model, tools=[search], system_prompt="You search.", callback_handler=None)
print(agent(sys.argv[2]))
