"""The ReAct agent of AgentScope 1, streamed; with `typed` for an answer of a type."""

import asyncio
import sys
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer."""

    answer: str


async def search(query: str) -> ToolResponse:
    """Find mails.

    Args:
        query (str): words to find.
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"Ada wrote about {query}")])


async def main() -> None:
    toolkit: Any = Toolkit()
    toolkit.register_tool_function(search)
    model: Any = OpenAIChatModel("gpt-4o", api_key="none", stream=True, client_kwargs={"base_url": f"{sys.argv[1]}/v1"})
    agent: Any = ReActAgent(
        name="searcher", sys_prompt="You search.", model=model, formatter=OpenAIChatFormatter(), toolkit=toolkit,
        memory=InMemoryMemory(),
    )  # fmt: skip
    typed = "typed" in sys.argv
    reply = await agent(Msg("user", sys.argv[2], "user"), structured_model=Answer if typed else None)
    print("\n" + str(reply.metadata if typed else reply.get_text_content()))


asyncio.run(main())
