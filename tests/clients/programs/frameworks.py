"""Agents of frameworks: `frameworks.py NAME URL QUESTION [OPTION...]` plays the function with this name."""

import asyncio
import functools
import operator
import os
import sys
from typing import Any


def search(query: str) -> str:
    """Find mails.

    Args:
        query: words to find.
    """
    return f"Ada wrote about {query}"


def answer_type() -> Any:
    """Return the type of typed answers."""
    from pydantic import BaseModel

    class Answer(BaseModel):
        """The answer."""

        answer: str

    return Answer


def langchain_agent(url: str, question: str, *options: str) -> None:
    """LangChain's agent on LangGraph with ChatOpenAI or ChatAnthropic, streamed.

    With `typed` it gives a typed answer; `plain` is a tool loop on the model alone.
    """
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    model: Any
    if options[0] == "anthropic":
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(model="claude-sonnet-4-5", base_url=url, api_key="none")  # type: ignore[call-arg, unused-ignore]
    else:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model="gpt-5", base_url=f"{url}/v1", api_key="none")  # type: ignore[arg-type, unused-ignore]
    inputs: Any = {"messages": [{"role": "user", "content": question}]}
    if "typed" in options:
        typed_agent: Any = create_agent(
            model, [tool(search)], system_prompt="You search.", response_format=answer_type()
        )
        print(typed_agent.invoke(inputs)["structured_response"].answer)
        return
    if "plain" in options:
        history: list[Any] = [("system", "You search."), ("user", question)]
        bound = model.bind_tools([tool(search)])
        while (answer := functools.reduce(operator.add, bound.stream(history))).tool_calls:
            history += [answer, *map(tool(search).invoke, answer.tool_calls)]
        print(answer.content)
        return
    agent: Any = create_agent(model, [tool(search)], system_prompt="You search.")
    text: Any = ""
    for message, _ in agent.stream(inputs, stream_mode="messages"):
        if message.type == "AIMessageChunk":
            text = "" if message.tool_call_chunks else text + str(message.text)
    print(text)


async def openai_agents(url: str, question: str, *options: str) -> None:
    """openai-agents with its default model and API, streamed.

    With `typed` for an answer of a type, with `conversation` for a session that the server stores.
    """
    from agents import (
        Agent,
        OpenAIConversationsSession,
        Runner,
        function_tool,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    set_default_openai_client(client)
    session = OpenAIConversationsSession(openai_client=client) if "conversation" in options else None
    output_type = answer_type() if "typed" in options else None
    agent: Any = Agent(
        name="searcher", instructions="You search.", tools=[function_tool(search)], output_type=output_type
    )
    result: Any = Runner.run_streamed(agent, question, session=session)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


async def pydantic_agent(url: str, question: str, *options: str) -> None:
    """pydantic-ai, streamed, with the model `options[0]`; with `typed` for an answer of a type."""
    os.environ |= {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none",
    }  # fmt: skip
    from pydantic_ai import Agent

    agent: Any = Agent(options[0], instructions="You search.", output_type=answer_type() if "typed" in options else str)
    agent.tool_plain(search)
    async with agent.run_stream(question) as result:
        print(await result.get_output())


async def agentscope1_agent(url: str, question: str, *options: str) -> None:
    """The ReAct agent of AgentScope 1, streamed; with `typed` for an answer of a type."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.memory import InMemoryMemory
    from agentscope.message import Msg, TextBlock
    from agentscope.model import OpenAIChatModel
    from agentscope.tool import Toolkit, ToolResponse

    async def search(query: str) -> ToolResponse:
        """Find mails.

        Args:
            query (str): words to find.
        """
        return ToolResponse(content=[TextBlock(type="text", text=f"Ada wrote about {query}")])

    toolkit: Any = Toolkit()
    toolkit.register_tool_function(search)
    model: Any = OpenAIChatModel("gpt-4o", api_key="none", stream=True, client_kwargs={"base_url": f"{url}/v1"})
    agent: Any = ReActAgent(
        name="searcher", sys_prompt="You search.", model=model, formatter=OpenAIChatFormatter(), toolkit=toolkit,
        memory=InMemoryMemory(),
    )  # fmt: skip
    typed = "typed" in options
    reply = await agent(Msg("user", question, "user"), structured_model=answer_type() if typed else None)
    print("\n" + str(reply.metadata if typed else reply.get_text_content()))


async def agentscope_agent(url: str, question: str, *options: str) -> None:
    """AgentScope's ReAct agent, streamed; with `typed` for an answer of a type."""
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

    credential: Any = OpenAICredential(api_key="none", base_url=f"{url}/v1")
    model: Any = OpenAIChatModel(credential=credential, model="gpt-4o", stream=True)
    state: Any = AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))
    toolkit: Any = Toolkit(tools=[FunctionTool(search)])
    agent: Any = Agent(name="searcher", system_prompt="You search.", model=model, toolkit=toolkit, state=state)
    typed = "typed" in options
    schema = answer_type() if typed else None
    reply = await agent.reply(UserMsg(name="user", content=question), structured_schema=schema)
    print("\n" + str(reply.structured_output if typed else reply.get_text_content()))


def agno_agent(url: str, question: str, *options: str) -> None:
    """agno's agent, streamed, on chat completions or Responses."""
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat, OpenAIResponses

    model_class: Any = OpenAIResponses if options[0] == "responses" else OpenAIChat
    model = model_class(id="gpt-5", base_url=f"{url}/v1", api_key="none")
    agent = Agent(model=model, tools=[search], instructions="You search.", telemetry=False)
    events: Any = agent.run(question, stream=True)
    print("".join(getattr(event, "content", None) or "" for event in events))


async def autogen_agent(url: str, question: str) -> None:
    """AutoGen's assistant, streamed."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client: Any = OpenAIChatCompletionClient(model="gpt-4o", base_url=f"{url}/v1", api_key="none")
    agent: Any = AssistantAgent(
        "searcher",
        client,
        tools=[search],
        system_message="You search.",
        max_tool_iterations=5,
        model_client_stream=True,
    )
    print((await agent.run(task=question)).messages[-1].content)


async def adk_agent(url: str, question: str) -> None:
    """Google's ADK on litellm, streamed."""
    from google.adk.agents import Agent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    model: Any = LiteLlm("openai/gpt-4o", api_base=f"{url}/v1", api_key="none")
    agent = Agent(name="searcher", model=model, instruction="You search.", tools=[search])
    runner: Any = InMemoryRunner(agent, app_name="clients")
    session = await runner.session_service.create_session(app_name="clients", user_id="u")
    content = types.Content(role="user", parts=[types.Part(text=question)])
    text = ""
    config = RunConfig(streaming_mode=StreamingMode.SSE)
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content, run_config=config):
        if event.is_final_response() and event.content and event.content.parts:
            text = "".join(part.text or "" for part in event.content.parts)
    print("\n" + text)


def crewai_crew(url: str, question: str) -> None:
    """A crew of one agent."""
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    model: Any = LLM(model="openai/gpt-4o", base_url=f"{url}/v1", api_key="none", stream=True)
    agent: Any = Agent(
        role="searcher", goal="You search.", backstory="You are quick.", llm=model, tools=[tool("search")(search)]
    )
    task: Any = Task(description=question, expected_output="One sentence.", agent=agent)
    print("\n" + str(Crew(agents=[agent], tasks=[task]).kickoff()))


def dspy_react(url: str, question: str) -> None:
    """DSPy's ReAct."""
    import dspy

    dspy.configure(lm=dspy.LM("openai/gpt-4o", api_base=f"{url}/v1", api_key="none", cache=False))
    react: Any = dspy.ReAct("question -> answer", tools=[search])
    print(react(question=question).answer)


def haystack_agent(url: str, question: str, *options: str) -> None:
    """Haystack's agent, streamed, on chat completions or Responses."""
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import tool
    from haystack.utils import Secret

    generator_class: Any = OpenAIResponsesChatGenerator if options[0] == "responses" else OpenAIChatGenerator
    generator = generator_class(
        model="gpt-5",
        api_base_url=f"{url}/v1",
        api_key=Secret.from_token("none"),
        streaming_callback=lambda chunk: None,
    )
    agent = Agent(chat_generator=generator, tools=[tool(search)], system_prompt="You search.")
    print(agent.run(messages=[ChatMessage.from_user(question)])["last_message"].text)


async def llamaindex_agent(url: str, question: str, *options: str) -> None:
    """LlamaIndex's agent, streamed, on chat completions or Responses."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai import OpenAI, OpenAIResponses

    model_class: Any = OpenAIResponses if options[0] == "responses" else OpenAI
    model = model_class(model="gpt-4o", api_base=f"{url}/v1", api_key="none")
    agent = FunctionAgent(tools=[search], llm=model, system_prompt="You search.")
    print(await agent.run(question))


async def semantic_kernel_agent(url: str, question: str, *options: str) -> None:
    """Semantic Kernel's agent, on chat completions or Responses."""
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import KernelPlugin, kernel_function

    class Mails:
        """Functions of the plugin."""

        @kernel_function(description="Find mails.")  # type: ignore[untyped-decorator, unused-ignore]
        def search(self, query: str) -> str:
            return f"Ada wrote about {query}"

    client = AsyncOpenAI(api_key="none", base_url=f"{url}/v1")
    parameters: Any = {
        "name": "finder",
        "instructions": "You search.",
        "plugins": [KernelPlugin.from_object("mail", Mails())],
    }
    agent: Any
    if options[0] == "responses":
        agent = OpenAIResponsesAgent(ai_model_id="gpt-5", client=client, **parameters)
    else:
        agent = ChatCompletionAgent(service=OpenAIChatCompletion("gpt-5", async_client=client), **parameters)
    print(await agent.get_response(messages=question))


def smolagents_agent(url: str, question: str, *options: str) -> None:
    """smolagents, streamed: the agent that calls tools, or the one that writes code."""
    from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

    model: Any = OpenAIModel(model_id="gpt-4o", api_base=f"{url}/v1", api_key="none")
    kind: Any = {"code": CodeAgent, "tools": ToolCallingAgent}[options[0]]
    agent = kind(tools=[tool(search)], model=model, max_steps=5, verbosity_level=0, stream_outputs=True)
    print("\n" + str(agent.run(question)))


def strands_agent(url: str, question: str, *options: str) -> None:
    """Strands' agent, streamed, on chat completions or Responses."""
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel
    from strands.models.openai_responses import OpenAIResponsesModel

    model_class: Any = OpenAIResponsesModel if options[0] == "responses" else OpenAIModel
    model = model_class(client_args={"api_key": "none", "base_url": f"{url}/v1"}, model_id="gpt-5")
    agent = Agent(model=model, tools=[tool(search)], system_prompt="You search.", callback_handler=None)
    print(agent(question))


if __name__ == "__main__":
    running = globals()[sys.argv[1]](*sys.argv[2:])
    if asyncio.iscoroutine(running):
        asyncio.run(running)
