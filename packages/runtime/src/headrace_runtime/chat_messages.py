"""Conversion of messages to the form that chat templates expect. Engines and trainer share it, so that they render the
same prompts."""

from __future__ import annotations

import json
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json

from headrace_schemas.events.chat import Message

_NO_ARGUMENTS = ("", "null", '""')
"""Texts, besides `{}`, that models and clients write for a tool call without arguments."""


def template_message(message: Message) -> dict[str, Any]:
    """Return a message as a dictionary for a chat template, with its content as one text and with parsed tool
    arguments."""
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
