"""Semantic Kernel's agent, on chat completions or Responses."""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import KernelPlugin, kernel_function


class Mails:
    """Functions of the plugin."""

    @kernel_function(description="Find mails.")  # type: ignore[untyped-decorator, unused-ignore]
    def search(self, query: str) -> str:
        return f"Ada wrote about {query}"


async def main() -> None:
    client = AsyncOpenAI(api_key="none", base_url=f"{sys.argv[1]}/v1")
    options: Any = {
        "name": "finder",
        "instructions": "You search.",
        "plugins": [KernelPlugin.from_object("mail", Mails())],
    }
    agent: Any
    if sys.argv[3] == "responses":
        agent = OpenAIResponsesAgent(ai_model_id="gpt-5", client=client, **options)
    else:
        agent = ChatCompletionAgent(service=OpenAIChatCompletion("gpt-5", async_client=client), **options)
    print(await agent.get_response(messages=sys.argv[2]))


asyncio.run(main())
