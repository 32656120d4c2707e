"""LangChain's agent on LangGraph, streamed, with ChatOpenAI or ChatAnthropic."""

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool


@tool  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


model: Any
if sys.argv[3] == "anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="claude-sonnet-4-5", base_url=sys.argv[1], api_key="none")  # type: ignore[call-arg, unused-ignore]
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="gpt-5", base_url=f"{sys.argv[1]}/v1", api_key="none")  # type: ignore[arg-type, unused-ignore]
agent: Any = create_agent(model, [search], system_prompt="You search.")
text: Any = ""
for message, _ in agent.stream({"messages": [{"role": "user", "content": sys.argv[2]}]}, stream_mode="messages"):
    if message.type == "AIMessageChunk":
        text = "" if message.tool_call_chunks else text + str(message.text)
print(text)
