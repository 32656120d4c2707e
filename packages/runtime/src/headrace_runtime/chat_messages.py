"""Messages as chat templates expect them. Whoever renders a template, an engine or a trainer, gives it the same."""

from __future__ import annotations

import json
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json

from headrace_schemas.events.chat import Message

_NO_ARGUMENTS = ("", "null", '""')
"""What models and clients write for a call without arguments, beside `{}`."""


def for_template(message: Message) -> dict[str, Any]:
    """Text as one string, arguments as an object where they are one."""
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": argument_value(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def argument_value(arguments: str) -> JsonValue:
    """Return the JSON value of a call's arguments, an empty object where there are none.

    Malformed arguments, numbers that Python's floats and integers cannot hold, more than 200 levels, and half a
    surrogate pair, which is no text, stay the string that they are.
    """
    if arguments.strip() in _NO_ARGUMENTS:
        return {}
    try:
        value: JsonValue = from_json(arguments, allow_inf_nan=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value
