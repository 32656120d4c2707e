"""JSON of a response: the settings of its request, and the items of the model's answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import JsonValue

from headrace_gateway.apis.responses_api.items import encode_reasoning
from headrace_gateway.apis.responses_api.request import ParsedResponses
from headrace_gateway.apis.responses_api.tools import OfferedTool, custom_input
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.engine_wire import EngineUsage, TokenLogprob
from headrace_gateway.requests.response_store import item_id_of

Json = dict[str, Any]
_LENGTH = "length"


class ResponseFrame:
    """Builder of the JSON of one response. The ids of its items contain the id of the call, so that feedback about an
    item finds the turn."""

    def __init__(self, parsed: ParsedResponses, call: ChatCall) -> None:
        self.id = call.response_id
        self._request = parsed.request
        self._tools = parsed.tools
        self._created_s = int(call.started_at.timestamp())

    @property
    def encrypts_reasoning(self) -> bool:
        """Whether reasoning items have `encrypted_content`."""
        return self._request.encrypts_reasoning

    def item_id(self, kind: str, position: int) -> str:
        """Return the id of the item at `position` of this response's output. It begins with `kind`, for example
        `msg`."""
        return item_id_of(kind, self.id, position)

    def tool(self, name: str | None) -> OfferedTool | None:
        """Return the request's tool that a call of the model names, or None if there is no tool of that name."""
        return self._tools.find(name)

    def response(
        self, status: str, version: str, output: Sequence[Json], usage: EngineUsage | None, finish: str | None
    ) -> Json:
        """Return the JSON of the response with the items of `output`."""
        request = self._request
        is_cut = status == "incomplete" and finish == _LENGTH
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": version,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            **({"conversation": {"id": request.conversation}} if request.conversation else {}),
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._choice(),
            "tools": self._tools.echoed,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": usage_of(usage) if usage is not None else None,
        }

    def _choice(self) -> JsonValue:
        choice = self._request.tool_choice
        return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump(mode="json")

    def _format(self) -> Json:
        text_format = self._request.text.format if self._request.text else None
        return (
            text_format.model_dump(mode="json", by_alias=True, exclude_none=True) if text_format else {"type": "text"}
        )


def status_of(finish: str | None) -> str:
    """Return the status of a response (`completed` or `incomplete`) for the `finish_reason` of a chat completion."""
    return "incomplete" if finish == _LENGTH else "completed"


def message(item_id: str, text: str | None, status: str, logprobs: Iterable[TokenLogprob] | None) -> Json:
    """Return the JSON of a message item. `text` is None before the text has begun."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Iterable[TokenLogprob] | None = None) -> Json:
    """Return the JSON of a content part with the text of a message."""
    part: Json = {"type": "output_text", "text": text, "annotations": []}
    return part if logprobs is None else part | {"logprobs": list(logprobs)}


def reasoning(item_id: str, text: str | None, status: str, *, encrypts: bool) -> Json:
    """Return the JSON of a reasoning item. `text` is None before the reasoning has begun."""
    content = [] if text is None else [reasoning_part(text)]
    item: Json = {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
    if encrypts:
        item["encrypted_content"] = None if text is None else encode_reasoning(text)
    return item


def reasoning_part(text: str) -> Json:
    """Return the JSON of a content part with the text of reasoning."""
    return {"type": "reasoning_text", "text": text}


def function_call(
    item_id: str, call_id: str | None, name: str | None, tool: OfferedTool | None, arguments: str, status: str
) -> Json:
    """Return the JSON of a function call item. `tool` restores the name and the namespace of the request."""
    item = {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": tool.tool.name if tool else name,
        "arguments": arguments,
        "status": status,
    }
    return item | {"namespace": tool.namespace} if tool and tool.namespace else item


def custom_tool_call(item_id: str, call_id: str | None, tool: OfferedTool, arguments: str, status: str) -> Json:
    """Return the JSON of a custom tool call item."""
    text = custom_input(arguments) if arguments else ""
    item = {
        "id": item_id,
        "type": "custom_tool_call",
        "call_id": call_id,
        "name": tool.tool.name,
        "input": text,
        "status": status,
    }
    return item | {"namespace": tool.namespace} if tool.namespace else item


def usage_of(usage: EngineUsage) -> Json:
    """Convert the engine's numbers of tokens to the object `usage` of the Responses API."""
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    reasoning_tokens = (usage.completion_tokens_details or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
