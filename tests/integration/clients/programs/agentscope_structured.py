"""Structured output of AgentScope by a forced call, plain and streamed: `agentscope_structured.py BASE_URL MODEL`."""

import asyncio
import json
import sys
from typing import Any

from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from pydantic import BaseModel


class Author(BaseModel):
    """Typed answer of the agent."""

    answer: str


async def solve(base_url: str, name: str, *, stream: bool) -> dict[str, Any]:
    model = OpenAIChatModel(OpenAICredential(api_key="none", base_url=base_url), name, stream=stream)
    answer = await model.generate_structured_output([UserMsg("user", "Who wrote about the invoice?")], Author)
    return dict(answer.content)


async def main(base_url: str, name: str) -> None:
    print(json.dumps([await solve(base_url, name, stream=stream) for stream in (False, True)]))


asyncio.run(main(*sys.argv[1:3]))
