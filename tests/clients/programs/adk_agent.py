"""Google's ADK on litellm, streamed."""

import asyncio
import sys
from typing import Any

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


async def main() -> None:
    model: Any = LiteLlm("openai/gpt-4o", api_base=f"{sys.argv[1]}/v1", api_key="none")
    agent = Agent(name="searcher", model=model, instruction="You search.", tools=[search])
    runner: Any = InMemoryRunner(agent, app_name="clients")
    session = await runner.session_service.create_session(app_name="clients", user_id="u")
    content = types.Content(role="user", parts=[types.Part(text=sys.argv[2])])
    text = ""
    config = RunConfig(streaming_mode=StreamingMode.SSE)
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content, run_config=config):
        if event.is_final_response() and event.content and event.content.parts:
            text = "".join(part.text or "" for part in event.content.parts)
    print("\n" + text)


asyncio.run(main())
