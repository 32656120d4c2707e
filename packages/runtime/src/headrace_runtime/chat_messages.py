"""Conversion of messages for chat templates, shared by engines and trainer so that they render the same prompts."""

from __future__ import annotations

import json
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json

from headrace_schemas.events.chat import Message

_NO_ARGUMENTS = ("", "null", '""')
"""Arguments of a call without arguments, besides `{}`, as some models and clients write them."""


def template_message(message: Message) -> dict[str, Any]:
    """Return a message for a chat template, with its text as one string and tool arguments as objects if possible."""
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": argument_value(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def argument_value(arguments: str) -> JsonValue:
    """Return the JSON value of a call's arguments, or an empty object without arguments.

    Arguments that cannot be represented stay strings: malformed JSON, numbers outside of Python's floats and integers,
    more than 200 levels, and lone surrogates.
    """
    if arguments.strip() in _NO_ARGUMENTS:
        return {}
    try:
        value: JsonValue = from_json(arguments, allow_inf_nan=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value
