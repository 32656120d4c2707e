"""Haystack's agent, streamed, on chat completions or Responses."""

import sys
from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


generator_class: Any = OpenAIResponsesChatGenerator if sys.argv[3] == "responses" else OpenAIChatGenerator
generator = generator_class(
    model="gpt-5",
    api_base_url=f"{sys.argv[1]}/v1",
    api_key=Secret.from_token("none"),
    streaming_callback=lambda chunk: None,
)
agent = Agent(chat_generator=generator, tools=[search], system_prompt="You search.")
print(agent.run(messages=[ChatMessage.from_user(sys.argv[2])])["last_message"].text)
