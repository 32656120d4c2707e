"""openai-agents with its default model and API, streamed."""

import asyncio
import sys
from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    result: Any = Runner.run_streamed(Agent(name="searcher", instructions="You search.", tools=[search]), sys.argv[2])
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
