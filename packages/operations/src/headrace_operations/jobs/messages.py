"""Conversion of messages and tools in data sets to the message types of events. Pure functions."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from headrace_operations.jobs.sources import BadRow
from headrace_schemas import Message, Tool
from headrace_schemas.values.text import plain_json, plain_number, plain_value

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
"""Senders of ShareGPT and related conversations to roles; other senders are roles already."""
_MESSAGE_FIELDS = frozenset(Message.model_fields)


def parse_messages(value: object, role: str, location: str) -> tuple[Message, ...]:
    """Parse a text as one message of `role`, or parse a list of messages."""
    if isinstance(value, str):
        return (_validate_message({"role": role, "content": value}, location),)
    if isinstance(value, Mapping):
        value = [value]
    return parse_chat(value, location)


def parse_chat(value: object, location: str, *, weighted: bool = False) -> tuple[Message, ...]:
    """Parse a list of messages with `role` and `content`, or with `from` and `value`.

    Args:
        value: the list.
        location: column name for error messages.
        weighted: whether the caller reads the weights with `untrained_positions`; otherwise weight 0 is refused.

    Raises:
        BadRow: a message is invalid.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadRow("format", f"{location}: must be a list of messages, but is {_describe_kind(value)}")
    if not weighted and (untrained := untrained_positions(value)):
        raise BadRow("format", f"{location}, message {untrained[0] + 1}: only chats may have messages of weight 0")
    return tuple(_parse_chat_message(message, number, location) for number, message in enumerate(value, 1))


def untrained_positions(value: object) -> tuple[int, ...]:
    """Return the positions of assistant messages with `"weight": 0`, which are context and are not trained.

    Raises:
        BadRow: a weight is neither 0 nor 1.
    """
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return tuple(
        position for position, item in enumerate(items) if isinstance(item, Mapping) and not _is_trained(item, position)
    )


def _is_trained(message: Mapping[str, Any], position: int) -> bool:
    weight = message.get("weight")
    if weight is None:
        return True
    is_trained = zero_or_one(weight)
    if is_trained is None:
        problem = f"message {position + 1}: weight = {reprlib.repr(weight)}"
        raise BadRow("format", f"{problem}: must be 1, or 0 for an answer that is not trained")
    return is_trained


def zero_or_one(value: object) -> bool | None:
    """Return a number 0 or 1 of any library as a boolean, and None for any other value."""
    try:
        number = plain_number(value)
    except (TypeError, ValueError):
        return None
    return bool(number) if number in (0, 1) else None


def parse_tools(value: object) -> tuple[Tool, ...]:
    """Parse tools in the format of the OpenAI API, as a list or as JSON text; a bare function is accepted as a tool.

    Raises:
        BadRow: a tool is invalid.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError):
            raise BadRow("format", "tools: is not JSON") from None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow("format", f"tools: must be a list, but is {_describe_kind(value)}")
    return tuple(_parse_tool(tool, number) for number, tool in enumerate(value, 1))


def _parse_tool(value: object, number: int) -> Tool:
    value = _without_nulls(value)
    if isinstance(value, dict) and "function" not in value and "name" in value:
        value = {"type": "function", "function": value}
    try:
        return Tool.model_validate(value)
    except ValidationError as error:
        raise BadRow("format", f"tool {number}: {_first_problem(error)}") from None


def _parse_chat_message(value: object, number: int, location: str) -> Message:
    message_location = f"{location}, message {number}"
    value = _without_nulls(value)
    if not isinstance(value, dict):
        raise BadRow(
            "format",
            f"{message_location}: must be an object with role and content, but is {_describe_kind(value)}",
        )
    if "from" in value and "role" not in value:
        value = _from_share_gpt(value)
    value.pop("weight", None)
    return _validate_message(value, message_location)


def _from_share_gpt(value: dict[str, Any]) -> dict[str, Any]:
    speaker = str(value.pop("from"))
    text = value.pop("value", None)
    if speaker == "function_call":
        return {**value, "role": "assistant", "tool_calls": [_parse_function_call(text)]}
    return {**value, "role": _ROLES.get(speaker, speaker), "content": text}


def _parse_function_call(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise BadRow("format", "function_call: is not JSON") from None


def _validate_message(value: dict[str, Any], location: str) -> Message:
    unknown = sorted(value.keys() - _MESSAGE_FIELDS - {"function_call"})
    if unknown:
        raise BadRow("format", f"{location}: unknown field {unknown[0]!r}; ignore it with --ignore {unknown[0]}")
    if (call := value.pop("function_call", None)) is not None:
        value["tool_calls"] = [call]
    if calls := value.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRow("format", f"{location}: tool_calls must be a list, but is {_describe_kind(calls)}")
        value["tool_calls"] = [_parse_tool_call(call, number, location) for number, call in enumerate(calls)]
    else:
        value.pop("tool_calls", None)
    try:
        return Message.model_validate(value)
    except ValidationError as error:
        raise BadRow("format", f"{location}: {_first_problem(error)}") from None


def _parse_tool_call(value: object, number: int, location: str) -> dict[str, Any]:
    """Convert a tool call to one with an id and with arguments as JSON text."""
    if not isinstance(value, dict):
        raise BadRow("format", f"{location}: a tool call must be an object, but is {_describe_kind(value)}")
    function = value.get("function", value)
    if not isinstance(function, dict):
        raise BadRow(
            "format", f"{location}: the function of a tool call must be an object, but is {_describe_kind(function)}"
        )
    arguments = function.get("arguments", function.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(plain_json(arguments), ensure_ascii=False)
    return {"id": value.get("id") or f"call_{number}", "function": {"name": function.get("name"), "arguments": text}}


def _without_nulls(value: object) -> object:
    """Remove null fields, because tables give every message the fields of all messages."""
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if getattr(value, "shape", None) == ():
        return plain_value(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_without_nulls(inner) for inner in value]
    return value


def _describe_kind(value: object) -> str:
    names: dict[type, str] = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list" if value else "empty"
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def _first_problem(error: ValidationError) -> str:
    """Return the first invalid field and its problem, without its value, which is private text."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'message'}: {first['msg']}"
