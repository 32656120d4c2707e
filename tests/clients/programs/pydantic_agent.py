"""pydantic-ai, streamed: `openai-chat:gpt-5`, `openai-responses:gpt-5` or `anthropic:claude-sonnet-4-5`, and perhaps
`typed` for an answer of a type."""

import asyncio
import os
import sys
from typing import Any

os.environ |= {
    "OPENAI_BASE_URL": f"{sys.argv[1]}/v1", "OPENAI_API_KEY": "none",
    "ANTHROPIC_BASE_URL": sys.argv[1], "ANTHROPIC_API_KEY": "none",
}  # fmt: skip
from pydantic import BaseModel
from pydantic_ai import Agent


class Answer(BaseModel):
    """The answer."""

    answer: str


agent: Any = Agent(sys.argv[3], instructions="You search.", output_type=Answer if "typed" in sys.argv else str)


@agent.tool_plain  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    async with agent.run_stream(sys.argv[2]) as result:
        print(await result.get_output())


asyncio.run(main())
