"""Agent with a tool loop on the anthropic package, plain and streamed: `anthropic_loop.py BASE_URL MODEL`."""

import json
import sys
from typing import Any

from anthropic import Anthropic

TOOLS: Any = [
    {
        "name": "search",
        "description": "Search the mail.",
        "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        "cache_control": {"type": "ephemeral"},
    }
]


def loop(base_url: str, model: str, *, stream: bool) -> dict[str, Any]:
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Who wrote about the invoice?"}]
    calls = 0
    while True:
        request: Any = {"model": model, "max_tokens": 200, "messages": messages, "tools": TOOLS}
        if stream:
            with client.messages.stream(**request) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**request)
        calls += 1
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": f"Ada wrote about {block.input['query']}"}],
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return {"answer": message.content[0].text, "calls": calls}


print(json.dumps([loop(sys.argv[1], sys.argv[2], stream=stream) for stream in (False, True)]))
