"""Tools with text arguments: their definitions in OpenAI's format, and the parsing of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

ERROR = "error: "
"""Beginning of the result of an invalid call. The model reads it and may try again."""


class WrongCall(Exception):
    """A model's call is invalid. The message is for the model."""


def definition(
    name: str, description: str, parameter: str, meaning: str, more: Mapping[str, object] | None = None
) -> ChatCompletionFunctionToolParam:
    """Return the definition of a tool for the model. `more` maps further parameters to their schemas."""
    properties = {parameter: {"type": "string", "description": meaning}, **(more or {})}
    schema: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def only_argument(arguments: str, parameter: str) -> str:
    """Return the value of the only parameter in a call's JSON. Raises `WrongCall`."""
    return str(named_arguments(arguments, (parameter,))[parameter])


def named_arguments(arguments: str, parameters: Sequence[str]) -> dict[str, Any]:
    """Return the values of a call's JSON, which must have exactly these parameters. Raises `WrongCall`."""
    try:
        values = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        raise WrongCall("arguments are not JSON") from None
    if not isinstance(values, dict) or values.keys() != set(parameters):
        raise WrongCall(f"expected the argument {' and '.join(parameters)}")
    return values
