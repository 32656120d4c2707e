"""Tool loops on client packages: `loops.py NAME URL QUESTION [OPTION...]` plays the function with this name."""

import json
import sys
from typing import Any

PARAMETERS: Any = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
"""Arguments of the tool `search`, which each client is given in its own form."""


def openai_chat(url: str, question: str) -> None:
    """The openai package's chat completions, streamed."""
    from openai import OpenAI

    definition: Any = {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": PARAMETERS,
        },
    }
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = [{"role": "system", "content": "You search."}, {"role": "user", "content": question}]
    while True:
        with client.chat.completions.stream(model="gpt-5", messages=messages, tools=[definition]) as events:
            message: Any = events.get_final_completion().choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            query = json.loads(call.function.arguments)["query"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Ada wrote about {query}"})
    print(message.content)


def openai_responses(url: str, question: str, *options: str) -> None:
    """The openai package's Responses API, streamed; the option is the field by which it goes on, if any."""
    from openai import OpenAI

    definition: Any = {
        "type": "function",
        "name": "search",
        "parameters": PARAMETERS,
    }
    field = "".join(options)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    items: list[Any] = [{"role": "user", "content": question}]
    previous: Any = {"conversation": client.conversations.create().id} if field == "conversation" else {}
    while True:
        with client.responses.stream(
            model="gpt-5", instructions="You search.", input=items, tools=[definition], store=bool(field), **previous
        ) as events:
            response = events.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        output = {"type": "function_call_output", "output": "Ada wrote it"}
        results = [{**output, "call_id": call.call_id} for call in calls]
        if field:
            items = results
            previous = previous if field == "conversation" else {field: response.id}
        else:
            items = [*items, *(item.model_dump(exclude={"parsed_arguments"}) for item in response.output), *results]
    print(response.output_text)


def anthropic_messages(url: str, question: str) -> None:
    """The anthropic package, streamed."""
    from anthropic import Anthropic

    definition: Any = {
        "name": "search",
        "input_schema": PARAMETERS,
    }
    client = Anthropic(base_url=url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        with client.messages.stream(
            model="claude-sonnet-4-5", max_tokens=500, system="You search.", messages=messages, tools=[definition]
        ) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "Ada wrote it"}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    print(message.content[-1].text)  # type: ignore[union-attr, unused-ignore]


def litellm_chat(url: str, question: str, *options: str) -> None:
    """litellm's chat, streamed, on the provider `openai` or `anthropic`."""
    import litellm

    definition: Any = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find mails.",
            "parameters": PARAMETERS,
        },
    }
    base = {"openai": f"{url}/v1", "anthropic": url}[options[0]]
    model = {"openai": "openai/gpt-4o", "anthropic": "anthropic/claude-sonnet-4-5"}[options[0]]
    messages: list[Any] = [{"role": "system", "content": "You search."}, {"role": "user", "content": question}]
    while True:
        chunks = litellm.completion(model, messages, tools=[definition], stream=True, api_base=base, api_key="none")
        response: Any = litellm.stream_chunk_builder(list(chunks), messages=messages)
        message = response.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            query = json.loads(call.function.arguments)["query"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Ada wrote about {query}"})
    print(message.content)


def litellm_responses(url: str, question: str) -> None:
    """litellm's Responses API, streamed."""
    import litellm

    definition: Any = {
        "type": "function",
        "name": "search",
        "description": "Find mails.",
        "parameters": PARAMETERS,
    }
    items: list[Any] = [{"role": "user", "content": question}]
    while True:
        events: Any = litellm.responses(
            input=items, model="openai/gpt-4o", instructions="You search.", tools=[definition], stream=True,
            store=False, api_base=f"{url}/v1", api_key="none",
        )  # fmt: skip
        response: Any = [event for event in events if event.type == "response.completed"][-1].response
        output = [item if isinstance(item, dict) else item.model_dump() for item in response.output]
        items += output
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            break
        for call in calls:
            query = json.loads(call["arguments"])["query"]
            result = {"type": "function_call_output", "output": f"Ada wrote about {query}"}
            items.append({**result, "call_id": call["call_id"]})
    print(output[-1]["content"][0]["text"])


def instructor_model(url: str, question: str) -> None:
    """instructor: an answer of a type, by a forced tool."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        answer: str

    client: Any = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"))
    messages = [{"role": "user", "content": question}]
    print(client.chat.completions.create(model="gpt-5", response_model=Answer, messages=messages).answer)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
