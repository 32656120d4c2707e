"""A response as JSON: what was asked, and the items that the model's answer is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import JsonValue

from headrace_gateway.chat_call import ChatCall
from headrace_gateway.engine_wire import EngineToolCall, EngineUsage, TokenLogprob
from headrace_gateway.responses_api.request import NamedFunctionTool, ResponsesRequest

Json = dict[str, Any]
_LENGTH = "length"


class ResponseFrame:
    """Everything of one response but its output. Ids follow from the call's, so that feedback finds its turn."""

    def __init__(self, asked: ResponsesRequest, call: ChatCall) -> None:
        self.id = call.response_id
        self._asked = asked
        self._created_s = int(call.started_at.timestamp())

    def item_id(self, kind: str, place: int) -> str:
        return f"{kind}_{self.id.removeprefix('chatcmpl-')}-{place}"

    def response(
        self, status: str, version: str, output: Sequence[Json], usage: EngineUsage | None, finish: str | None
    ) -> Json:
        asked = self._asked
        short = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if short and finish == _LENGTH else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": version,
            "output": list(output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._choice(),
            "tools": [tool.model_dump(mode="json", include=set(type(tool).model_fields)) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": usage_of(usage) if usage is not None else None,
        }

    def _choice(self) -> JsonValue:
        choice = self._asked.tool_choice
        return choice.model_dump(mode="json") if isinstance(choice, NamedFunctionTool) else choice or "auto"

    def _format(self) -> Json:
        asked = self._asked.text.format if self._asked.text else None
        return asked.model_dump(mode="json", by_alias=True, exclude_none=True) if asked else {"type": "text"}


def status_of(finish: str | None) -> str:
    """`finish` is the chat's `finish_reason`."""
    return "incomplete" if finish == _LENGTH else "completed"


def message(item_id: str, text: str | None, status: str, logprobs: Iterable[TokenLogprob] | None) -> Json:
    """`text` None: it has not begun."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Iterable[TokenLogprob] | None = None) -> Json:
    part: Json = {"type": "output_text", "text": text, "annotations": []}
    return part if logprobs is None else part | {"logprobs": list(logprobs)}


def reasoning(item_id: str, text: str | None, status: str) -> Json:
    """`text` None: it has not begun."""
    content = [] if text is None else [reasoning_part(text)]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def function_call(item_id: str, call: EngineToolCall, arguments: str, status: str) -> Json:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.function.name,
        "arguments": arguments,
        "status": status,
    }


def usage_of(usage: EngineUsage) -> Json:
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    thought = (usage.completion_tokens_details or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.total_tokens,
    }
