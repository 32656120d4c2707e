"""The fields `functions` and `function_call` of chat completions, which `tools` and `tool_choice` have replaced.

Requests are translated into requests with tools. Messages of this form have no ids of calls, so a call gets the
position of its message as its id. A replica knows the call by another id, so it gets the exact tokens from the gateway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from headrace_gateway.chat_messages import ChatMessage, EchoedToolCall
from headrace_gateway.engine_wire import EngineMessage
from headrace_gateway.refusals import ApiError
from headrace_schemas import Tool
from headrace_schemas.http.answer_form import NamedTool, ToolChoice

if TYPE_CHECKING:
    from headrace_gateway.chat_request import ChatRequest


FUNCTION_CALL = "function_call"
"""The `finish_reason` and the field of a call where the request has `functions`."""


def with_tools(request: ChatRequest) -> ChatRequest:
    """Return the request with tools in place of functions. Raises `ApiError` 400 for a request with both."""
    changes: dict[str, Any] = {}
    if any(message.role == "function" or message.function_call for message in request.messages):
        changes = {"messages": _messages_with_tools(request.messages), "functions": request.functions or ()}
    if request.functions:
        if request.tools or request.tool_choice is not None:
            raise ApiError(400, "invalid_value", "functions: tools are in their place; send one of them", "functions")
        changes["tools"] = tuple(Tool(function=function) for function in request.functions)
        changes["parallel_tool_calls"] = False
    choice = _choice(request)
    if choice is not None and request.functions:
        changes["tool_choice"] = choice
    return request.model_copy(update=changes) if changes else request


def old_fields(message: EngineMessage) -> dict[str, JsonValue]:
    """Return the field with the first call of an answer, or with its part in a delta; no field without one.

    The form has room for one call. The turn records all of them.
    """
    first = next((call.function for index, call in message.indexed_calls if index == 0), None)
    return {} if first is None else {FUNCTION_CALL: first.model_dump(exclude_none=True)}


def _choice(request: ChatRequest) -> ToolChoice:
    choice = request.function_call
    if choice is None or isinstance(choice, str):
        return choice
    if choice.name not in {function.name for function in request.functions or ()}:
        message = f"{FUNCTION_CALL}: names a function that is not among the functions"
        raise ApiError(400, "invalid_value", message, FUNCTION_CALL)
    return NamedTool(type="function", function=choice)


def _messages_with_tools(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    translated = []
    call_id = "call_0"
    for position, message in enumerate(messages):
        changes: dict[str, object] = {}
        if message.role == "function":
            changes = {"role": "tool", "tool_call_id": call_id}
        elif message.function_call is not None:
            call_id = f"call_{position}"
            changes = {"tool_calls": (EchoedToolCall(id=call_id, function=message.function_call),)}
        translated.append(message.model_copy(update={**changes, FUNCTION_CALL: None}) if changes else message)
    return tuple(translated)
