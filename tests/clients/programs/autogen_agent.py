"""AutoGen's assistant, streamed."""

import asyncio
import sys
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    client: Any = OpenAIChatCompletionClient(model="gpt-4o", base_url=f"{sys.argv[1]}/v1", api_key="none")
    agent: Any = AssistantAgent(
        "searcher",
        client,
        tools=[search],
        system_message="You search.",
        max_tool_iterations=5,
        model_client_stream=True,
    )
    print((await agent.run(task=sys.argv[2])).messages[-1].content)


asyncio.run(main())
