"""AgentScope's structured output: `agentscope_structured.py BASE_URL MODEL`, a forced call, plain and streamed."""

import asyncio
import json
import sys
from typing import Any

from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from pydantic import BaseModel


class Found(BaseModel):
    """What is asked for."""

    answer: str


async def solve(base_url: str, name: str, *, stream: bool) -> dict[str, Any]:
    model = OpenAIChatModel(OpenAICredential(api_key="none", base_url=base_url), name, stream=stream)
    found = await model.generate_structured_output([UserMsg("user", "Who wrote about the invoice?")], Found)
    return dict(found.content)


async def main(base_url: str, name: str) -> None:
    print(json.dumps([await solve(base_url, name, stream=stream) for stream in (False, True)]))


asyncio.run(main(*sys.argv[1:3]))
