"""Agent with a tool loop on the openai package, plain and streamed: `openai_loop.py BASE_URL MODEL`."""

import json
import sys
from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def loop(base_url: str, model: str, *, stream: bool) -> dict[str, Any]:
    client = OpenAI(base_url=base_url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Who wrote about the invoice?"}]
    calls = 0
    while True:
        if stream:
            with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as events:
                message: Any = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        calls += 1
        messages.append(message.model_dump())  # nulls and all
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            finding = f"Ada wrote about {json.loads(call.function.arguments)['query']}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": finding})
    return {"answer": message.content, "calls": calls}


print(json.dumps([loop(sys.argv[1], sys.argv[2], stream=stream) for stream in (False, True)]))
