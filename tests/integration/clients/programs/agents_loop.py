"""Agent of openai-agents with a tool and a typed answer: `agents_loop.py BASE_URL MODEL`.

It uses the Responses API and chat completions, plain and streamed.
"""

import asyncio
import json
import sys
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_default_openai_client
from agents import set_tracing_disabled as without_tracing
from openai import AsyncOpenAI
from pydantic import BaseModel


class Author(BaseModel):
    """Typed answer of the agent."""

    answer: str


@function_tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Finds mails."""
    return f"Ada wrote about {query}"


async def solve(model: Any, *, stream: bool) -> dict[str, Any]:
    agent = Agent(name="finder", instructions="Find it.", model=model, tools=[search], output_type=Author)
    question = "Who wrote about the invoice?"
    if stream:
        result: Any = Runner.run_streamed(agent, question)
        async for _event in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question)
    return {"answer": result.final_output.answer, "calls": len(result.raw_responses)}


async def main(base_url: str, name: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    without_tracing(True)
    set_default_openai_client(client, use_for_tracing=False)
    ways = [(model, stream) for model in (name, OpenAIChatCompletionsModel(name, client)) for stream in (False, True)]
    print(json.dumps([await solve(model, stream=stream) for model, stream in ways]))


asyncio.run(main(*sys.argv[1:3]))
