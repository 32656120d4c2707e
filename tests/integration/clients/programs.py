"""Agents on client packages, plain and streamed: `programs.py NAME BASE_URL MODEL` prints the results as JSON."""

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "Who wrote about the invoice?"
WAYS = (False, True)
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
FUNCTION: Any = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}


def search(query: str) -> str:
    """Find mails.

    Args:
        query: words to find.
    """
    return f"Ada wrote about {query}"


def answer_type() -> Any:
    """Return the type of typed answers."""
    from pydantic import BaseModel

    class Author(BaseModel):
        """Typed answer of the agent."""

        answer: str

    return Author


def openai_loop(base_url: str, model: str) -> list[Any]:
    """A tool loop on the openai package."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")

    def answer(messages: list[Any], stream: bool) -> Any:
        if not stream:
            return client.chat.completions.create(model=model, messages=messages, tools=[FUNCTION]).choices[0].message
        with client.chat.completions.stream(model=model, messages=messages, tools=[FUNCTION]) as events:
            return events.get_final_completion().choices[0].message

    return [_loop(answer, stream) for stream in WAYS]


def litellm_loop(base_url: str, model: str) -> list[Any]:
    """A tool loop on litellm. Messages have all fields that litellm adds."""
    import litellm

    function = {**FUNCTION["function"], "description": "Find mails."}
    request: dict[str, Any] = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none"}
    request["tools"] = [{**FUNCTION, "function": function}]

    def answer(messages: list[Any], stream: bool) -> Any:
        if not stream:
            return litellm.completion(**request, messages=messages).choices[0].message
        usage = {"include_usage": True}
        chunks = list(litellm.completion(**request, messages=messages, stream=True, stream_options=usage))
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message

    return [_loop(answer, stream) for stream in WAYS]


def _loop(answer: Callable[[list[Any], bool], Any], stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for calls in itertools.count(1):
        message = answer(messages, stream)
        messages.append(message.model_dump())  # nulls and all
        if not message.tool_calls:
            return {"answer": message.content, "calls": calls}
        for call in message.tool_calls:
            finding = search(json.loads(call.function.arguments)["query"])
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "search", "content": finding})
    raise AssertionError("unreachable")


def anthropic_loop(base_url: str, model: str) -> list[Any]:
    """A tool loop on the anthropic package."""
    from anthropic import Anthropic

    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    definition = {"name": "search", "description": "Search the mail.", "input_schema": PARAMETERS}
    tools = [{**definition, "cache_control": {"type": "ephemeral"}}]

    def play(stream: bool) -> dict[str, Any]:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for calls in itertools.count(1):
            request: Any = {"model": model, "max_tokens": 200, "messages": messages, "tools": tools}
            if stream:
                with client.messages.stream(**request) as events:
                    message: Any = events.get_final_message()
            else:
                message = client.messages.create(**request)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                return {"answer": message.content[0].text, "calls": calls}
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": search(block.input["query"])}],
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        raise AssertionError("unreachable")

    return [play(stream) for stream in WAYS]


def smolagents_agent(base_url: str, model: str) -> list[Any]:
    """An agent of smolagents on the openai package, then on litellm."""
    from smolagents import LiteLLMModel, OpenAIModel, ToolCallingAgent, tool

    options: dict[str, Any] = {"api_base": base_url, "api_key": "none", "tool_choice": "auto"}  # else it forces a call

    def play(served: Any, stream: bool) -> dict[str, Any]:
        agent = ToolCallingAgent(
            tools=[tool(search)], model=served, max_steps=4, verbosity_level=0, stream_outputs=stream
        )
        return {"answer": str(agent.run(QUESTION)), "calls": len(agent.memory.steps) - 1}

    clients = (OpenAIModel(model_id=model, **options), LiteLLMModel(model_id=f"openai/{model}", **options))
    return [play(client, stream) for client in clients for stream in WAYS]


def dspy_agent(base_url: str, model: str) -> list[Any]:
    """DSPy's ReAct agent, which sends its requests through litellm."""
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{model}", api_base=base_url, api_key="none", cache=False, num_retries=0))
    agent = dspy.ReAct("question -> answer", tools=[search], max_iters=4)
    return [{"answer": agent(question=QUESTION).answer, "calls": len(dspy.settings.lm.history)}]


def agents_loop(base_url: str, name: str) -> list[Any]:
    """An agent of openai-agents with a tool and a typed answer, on the Responses API, then on chat completions."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_default_openai_client
    from agents import set_tracing_disabled as without_tracing
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none")
    without_tracing(True)
    set_default_openai_client(client, use_for_tracing=False)

    async def play(model: Any, stream: bool) -> dict[str, Any]:
        tools: list[Any] = [function_tool(search)]
        agent = Agent(name="finder", instructions="Find it.", model=model, tools=tools, output_type=answer_type())
        if stream:
            result: Any = Runner.run_streamed(agent, QUESTION)
            async for _event in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, QUESTION)
        return {"answer": result.final_output.answer, "calls": len(result.raw_responses)}

    async def play_all() -> list[Any]:
        models = (name, OpenAIChatCompletionsModel(name, client))
        return [await play(model, stream) for model in models for stream in WAYS]

    return asyncio.run(play_all())


def agentscope_structured(base_url: str, name: str) -> list[Any]:
    """Structured output of AgentScope by a forced call."""
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel

    async def play(stream: bool) -> dict[str, Any]:
        model = OpenAIChatModel(OpenAICredential(api_key="none", base_url=base_url), name, stream=stream)
        answer = await model.generate_structured_output([UserMsg("user", QUESTION)], answer_type())
        return dict(answer.content)

    async def play_all() -> list[Any]:
        return [await play(stream) for stream in WAYS]

    return asyncio.run(play_all())


if __name__ == "__main__":
    print("\n" + json.dumps(globals()[sys.argv[1]](*sys.argv[2:4])))
