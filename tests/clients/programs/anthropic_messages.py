"""The anthropic package, streamed."""

import sys
from typing import Any

from anthropic import Anthropic

TOOL: Any = {
    "name": "search",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
client = Anthropic(base_url=sys.argv[1], api_key="none")
messages: list[Any] = [{"role": "user", "content": sys.argv[2]}]
while True:
    with client.messages.stream(
        model="claude-sonnet-4-5", max_tokens=500, system="You search.", messages=messages, tools=[TOOL]
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
