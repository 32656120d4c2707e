"""AgentScope's ReAct agent, streamed; with `typed` for an answer of a type."""

import asyncio
import sys
from typing import Any

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer."""

    answer: str


async def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    credential: Any = OpenAICredential(api_key="none", base_url=f"{sys.argv[1]}/v1")
    model: Any = OpenAIChatModel(credential=credential, model="gpt-4o", stream=True)
    state: Any = AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))
    toolkit: Any = Toolkit(tools=[FunctionTool(search)])
    agent: Any = Agent(name="searcher", system_prompt="You search.", model=model, toolkit=toolkit, state=state)
    typed = "typed" in sys.argv
    schema = Answer if typed else None
    reply = await agent.reply(UserMsg(name="user", content=sys.argv[2]), structured_schema=schema)
    print("\n" + str(reply.structured_output if typed else reply.get_text_content()))


asyncio.run(main())
