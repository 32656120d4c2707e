"""litellm's chat, streamed, on the provider `openai` or `anthropic`."""

import json
import sys
from typing import Any

import litellm

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find mails.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
base = {"openai": f"{sys.argv[1]}/v1", "anthropic": sys.argv[1]}[sys.argv[3]]
model = {"openai": "openai/gpt-4o", "anthropic": "anthropic/claude-sonnet-4-5"}[sys.argv[3]]
messages: list[Any] = [{"role": "system", "content": "You search."}, {"role": "user", "content": sys.argv[2]}]
while True:
    chunks = litellm.completion(model, messages, tools=[TOOL], stream=True, api_base=base, api_key="none")
    response: Any = litellm.stream_chunk_builder(list(chunks), messages=messages)
    message = response.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        query = json.loads(call.function.arguments)["query"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Ada wrote about {query}"})
print(message.content)
