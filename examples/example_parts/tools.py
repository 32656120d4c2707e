"""Tools with one argument, a text: their definitions in OpenAI's form, and how a model's call of one is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

ERROR = "error: "
"""How the answer of a tool begins when a call was wrong. The model reads it and may try again."""


class WrongCall(Exception):
    """The model asked for something that there is not; the message is for the model."""


def definition(name: str, description: str, parameter: str, meaning: str) -> ChatCompletionFunctionToolParam:
    """What the model is told of a tool."""
    schema: dict[str, object] = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": meaning}},
        "required": [parameter],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def only_argument(arguments: str, parameter: str) -> str:
    """The value of `parameter` in a call's JSON, which holds nothing else. Raises `WrongCall`."""
    try:
        values = json.loads(arguments)
    except json.JSONDecodeError:
        raise WrongCall("arguments are not JSON") from None
    if not isinstance(values, dict) or list(values) != [parameter]:
        raise WrongCall(f"expected the argument {parameter}")
    return str(values[parameter])
