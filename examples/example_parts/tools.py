"""Tools that take a text: their definitions in OpenAI's form, and how a model's call of one is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

ERROR = "error: "
"""How the answer of a tool begins when a call was wrong. The model reads it and may try again."""


class WrongCall(Exception):
    """The model asked for something that there is not; the message is for the model."""


def definition(
    name: str, description: str, parameter: str, meaning: str, more: Mapping[str, object] | None = None
) -> ChatCompletionFunctionToolParam:
    """What the model is told of a tool. `more` are the schemas of other parameters by name."""
    properties = {parameter: {"type": "string", "description": meaning}, **(more or {})}
    schema: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def only_argument(arguments: str, parameter: str) -> str:
    """The value of `parameter` in a call's JSON, which holds nothing else. Raises `WrongCall`."""
    return str(named_arguments(arguments, (parameter,))[parameter])


def named_arguments(arguments: str, parameters: Sequence[str]) -> dict[str, Any]:
    """The values of a call's JSON, which names these parameters and no others. Raises `WrongCall`."""
    try:
        values = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        raise WrongCall("arguments are not JSON") from None
    if not isinstance(values, dict) or values.keys() != set(parameters):
        raise WrongCall(f"expected the argument {' and '.join(parameters)}")
    return values
