"""litellm's Responses API, streamed."""

import json
import sys
from typing import Any

import litellm

TOOL: Any = {
    "type": "function",
    "name": "search",
    "description": "Find mails.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
items: list[Any] = [{"role": "user", "content": sys.argv[2]}]
while True:
    events: Any = litellm.responses(
        input=items, model="openai/gpt-4o", instructions="You search.", tools=[TOOL], stream=True, store=False,
        api_base=f"{sys.argv[1]}/v1", api_key="none",
    )  # fmt: skip
    response: Any = [event for event in events if event.type == "response.completed"][-1].response
    output = [item if isinstance(item, dict) else item.model_dump() for item in response.output]
    items += output
    calls = [item for item in output if item["type"] == "function_call"]
    if not calls:
        break
    for call in calls:
        query = json.loads(call["arguments"])["query"]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": f"Ada wrote about {query}"})
print(output[-1]["content"][0]["text"])
