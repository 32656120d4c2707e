"""The openai package's chat completions, streamed."""

import json
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
messages: list[Any] = [{"role": "system", "content": "You search."}, {"role": "user", "content": sys.argv[2]}]
while True:
    with client.chat.completions.stream(model="gpt-5", messages=messages, tools=[TOOL]) as events:
        message: Any = events.get_final_completion().choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        query = json.loads(call.function.arguments)["query"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Ada wrote about {query}"})
print(message.content)
