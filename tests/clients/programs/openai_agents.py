"""openai-agents with its default model and API, streamed; with `typed` for an answer of a type, with `conversation` for
a session that the server stores."""

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIConversationsSession,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer."""

    answer: str


@function_tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    set_default_openai_client(client)
    session = OpenAIConversationsSession(openai_client=client) if "conversation" in sys.argv else None
    output_type = Answer if "typed" in sys.argv else None
    agent: Any = Agent(name="searcher", instructions="You search.", tools=[search], output_type=output_type)
    result: Any = Runner.run_streamed(agent, sys.argv[2], session=session)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
