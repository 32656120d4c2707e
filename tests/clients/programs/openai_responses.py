"""The openai package's Responses API, streamed; the third argument is the field by which it goes on, if any."""

import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "name": "search",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
field = "".join(sys.argv[3:])
client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
items: list[Any] = [{"role": "user", "content": sys.argv[2]}]
previous: Any = {"conversation": client.conversations.create().id} if field == "conversation" else {}
while True:
    with client.responses.stream(
        model="gpt-5", instructions="You search.", input=items, tools=[TOOL], store=bool(field), **previous
    ) as events:
        response = events.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Ada wrote it"} for call in calls]
    if field:
        items = results
        previous = previous if field == "conversation" else {field: response.id}
    else:
        items = [*items, *(item.model_dump(exclude={"parsed_arguments"}) for item in response.output), *results]
print(response.output_text)
