"""LlamaIndex's agent, streamed, on chat completions or Responses."""

import asyncio
import sys
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI, OpenAIResponses


def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    model_class: Any = OpenAIResponses if sys.argv[3] == "responses" else OpenAI
    model = model_class(model="gpt-4o", api_base=f"{sys.argv[1]}/v1", api_key="none")
    agent = FunctionAgent(tools=[search], llm=model, system_prompt="You search.")
    print(await agent.run(sys.argv[2]))


asyncio.run(main())
