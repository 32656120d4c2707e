"""AgentScope's ReAct agent, streamed."""

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


async def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    credential: Any = OpenAICredential(api_key="none", base_url=f"{sys.argv[1]}/v1")
    model: Any = OpenAIChatModel(credential=credential, model="gpt-4o", stream=True)
    state: Any = AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))
    toolkit: Any = Toolkit(tools=[FunctionTool(search)])
    agent: Any = Agent(name="searcher", system_prompt="You search.", model=model, toolkit=toolkit, state=state)
    reply = await agent.reply(UserMsg(name="user", content=sys.argv[2]))
    print("\n" + str(reply.get_text_content()))


asyncio.run(main())
