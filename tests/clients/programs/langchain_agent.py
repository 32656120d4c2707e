"""LangChain's agent on LangGraph with ChatOpenAI or ChatAnthropic, streamed.

With `typed` it gives a typed answer; `plain` is a tool loop on the model alone.
"""

import functools
import operator
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer."""

    answer: str


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
inputs: Any = {"messages": [{"role": "user", "content": sys.argv[2]}]}
if "typed" in sys.argv:
    typed_agent: Any = create_agent(model, [search], system_prompt="You search.", response_format=Answer)
    print(typed_agent.invoke(inputs)["structured_response"].answer)
    sys.exit()
if "plain" in sys.argv:
    history: list[Any] = [("system", "You search."), ("user", sys.argv[2])]
    bound = model.bind_tools([search])
    while (answer := functools.reduce(operator.add, bound.stream(history))).tool_calls:
        history += [answer, *map(search.invoke, answer.tool_calls)]
    print(answer.content)
    sys.exit()
agent: Any = create_agent(model, [search], system_prompt="You search.")
text: Any = ""
for message, _ in agent.stream(inputs, stream_mode="messages"):
    if message.type == "AIMessageChunk":
        text = "" if message.tool_call_chunks else text + str(message.text)
print(text)
