"""Agent with a tool loop on litellm, plain and streamed: `litellm_loop.py BASE_URL MODEL`."""

import json
import sys
from typing import Any

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find mails.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def answer(messages: list[Any], base_url: str, model: str, *, stream: bool) -> Any:
    """Return the message of one call in litellm's format, with all fields that litellm adds."""
    request = {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "none",
        "messages": messages,
        "tools": TOOLS,
    }
    if not stream:
        return litellm.completion(**request).choices[0].message
    chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


def loop(base_url: str, model: str, *, stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": "Who wrote about the invoice?"}]
    calls = 0
    while True:
        message = answer(messages, base_url, model, stream=stream)
        calls += 1
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            finding = f"Ada wrote about {json.loads(call.function.arguments)['query']}"
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "search", "content": finding})
    return {"answer": message.content, "calls": calls}


print(json.dumps([loop(sys.argv[1], sys.argv[2], stream=stream) for stream in (False, True)]))
