"""Messages and tools as data sets have them, read as those of events. Pure."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from headrace_operations.jobs.rows import BadRow
from headrace_schemas import Message, Tool
from headrace_schemas.plain_values import plain_json, plain_number, plain_value

_SPEAKERS = {
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
"""Who speaks in ShareGPT's conversations and its relatives; the roles of chats stay as they are."""
_KNOWN = frozenset(Message.model_fields)


def said(value: object, role: str, where: str) -> tuple[Message, ...]:
    """A text, which `role` says, or a list of messages."""
    if isinstance(value, str):
        return (_message({"role": role, "content": value}, where),)
    if isinstance(value, Mapping):
        value = [value]
    return chat(value, where)


def chat(value: object, where: str, *, weighted: bool = False) -> tuple[Message, ...]:
    """A list of messages with `role` and `content`, or with `from` and `value`. Raises `BadRow`, also for a weight of 0
    where the caller does not read `weights` (`weighted`)."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadRow("format", f"{where} is {_kind(value)}; a list of messages is wanted")
    if not weighted and (untrained := weights(value)):
        raise BadRow("format", f"{where}, message {untrained[0] + 1} has the weight 0; only chats have weights")
    return tuple(_one(message, number, where) for number, message in enumerate(value, 1))


def weights(value: object) -> tuple[int, ...]:
    """Places of the messages with `"weight": 0`: the assistant says them, and they are not trained. Raises `BadRow` for
    a weight that is neither 0 nor 1."""
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return tuple(place for place, one in enumerate(items) if isinstance(one, Mapping) and not _is_trained(one, place))


def _is_trained(message: Mapping[str, Any], place: int) -> bool:
    weight = message.get("weight")
    if weight is None:
        return True
    is_trained = zero_or_one(weight)
    if is_trained is None:
        wrong = f"message {place + 1}: weight is {reprlib.repr(weight)}; 0 or 1 is wanted"
        raise BadRow("format", f"{wrong}, for an answer that is not trained or is")
    return is_trained


def zero_or_one(value: object) -> bool | None:
    """Return whether a number of any library is 1; None for what is neither 0 nor 1."""
    try:
        number = plain_number(value)
    except (TypeError, ValueError):
        return None
    return bool(number) if number in (0, 1) else None


def tools(value: object) -> tuple[Tool, ...]:
    """Tools as in the OpenAI API, as a list or as JSON text; a bare function is taken for one. Raises `BadRow`."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError):
            raise BadRow("format", "tools is no JSON") from None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow("format", f"tools is {_kind(value)}; a list is wanted")
    return tuple(_tool(one, number) for number, one in enumerate(value, 1))


def _tool(value: object, number: int) -> Tool:
    value = _without_nulls(value)
    if isinstance(value, dict) and "function" not in value and "name" in value:
        value = {"type": "function", "function": value}
    try:
        return Tool.model_validate(value)
    except ValidationError as error:
        raise BadRow("format", f"tool {number}: {_first(error)}") from None


def _one(value: object, number: int, where: str) -> Message:
    place = f"{where}, message {number}"
    value = _without_nulls(value)
    if not isinstance(value, dict):
        raise BadRow("format", f"{place} is {_kind(value)}; an object with role and content is wanted")
    if "from" in value and "role" not in value:
        value = _of_share_gpt(value)
    value.pop("weight", None)
    return _message(value, place)


def _of_share_gpt(value: dict[str, Any]) -> dict[str, Any]:
    speaker = str(value.pop("from"))
    text = value.pop("value", None)
    if speaker == "function_call":
        return {**value, "role": "assistant", "tool_calls": [_parsed(text)]}
    return {**value, "role": _SPEAKERS.get(speaker, speaker), "content": text}


def _parsed(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise BadRow("format", "a function_call is no JSON") from None


def _message(value: dict[str, Any], place: str) -> Message:
    unknown = sorted(value.keys() - _KNOWN - {"function_call"})
    if unknown:
        raise BadRow("format", f"{place} has {unknown[0]!r}, which nothing reads; leave it out (--ignore {unknown[0]})")
    if (call := value.pop("function_call", None)) is not None:
        value["tool_calls"] = [call]
    if calls := value.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRow("format", f"{place}: tool_calls is {_kind(calls)}; a list is wanted")
        value["tool_calls"] = [_call(one, number, place) for number, one in enumerate(calls)]
    else:
        value.pop("tool_calls", None)
    try:
        return Message.model_validate(value)
    except ValidationError as error:
        raise BadRow("format", f"{place}: {_first(error)}") from None


def _call(value: object, number: int, place: str) -> dict[str, Any]:
    """A tool call with an id and its arguments as JSON text, however it came."""
    if not isinstance(value, dict):
        raise BadRow("format", f"{place}: a tool call is {_kind(value)}; an object is wanted")
    function = value.get("function", value)
    if not isinstance(function, dict):
        raise BadRow("format", f"{place}: the function of a tool call is {_kind(function)}; an object is wanted")
    arguments = function.get("arguments", function.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(plain_json(arguments), ensure_ascii=False)
    return {"id": value.get("id") or f"call_{number}", "function": {"name": function.get("name"), "arguments": text}}


def _without_nulls(value: object) -> object:
    """Tables give every message the fields of all."""
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if getattr(value, "shape", None) == ():
        return plain_value(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_without_nulls(inner) for inner in value]
    return value


def _kind(value: object) -> str:
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


def _first(error: ValidationError) -> str:
    """Which field, and what is wrong; never its value, which is somebody's text."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
