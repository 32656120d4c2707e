"""The body of `POST /v1/responses`: what is honoured, and what is refused by name. It becomes a `ChatRequest`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import to_json

from headrace_gateway.chat_messages import says_something
from headrace_gateway.chat_request import HARMLESS, ChatRequest, parse_chat
from headrace_gateway.refusals import ApiError
from headrace_gateway.requests import check_values, parse, unknown_field
from headrace_gateway.responses_api.items import Item, Json, MessageItem, messages_of
from headrace_schemas.base import LongText, Model, Text
from headrace_schemas.bounds import JsonObject
from headrace_schemas.plain_values import none_if_empty

NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "store": (False,),
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "reasoning": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
    "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
    "prompt_cache_options": (),
    "access_programs": (),
    "image": (),
}
"""Fields that we cannot honour, with the values, besides empty ones, that ask for nothing."""
_WHY = {
    "store": "no response is kept; the captured turns are",
    "previous_response_id": "no response is kept; send what was said before as items of input",
    "conversation": "no conversation is kept; send what was said before as items of input",
    "truncation": "a prompt that is too long is refused, never cut",
    "reasoning": "there is no such setting here; chat_template_kwargs reach the template",
}
_CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "n": "model",
}
"""What the other API calls the same."""
LOGPROBS = "message.output_text.logprobs"


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return ({"type": "message", "role": "user", "content": value},)
    return tuple(value) if isinstance(value, list) else value


class FunctionTool(Model):
    """A tool on offer. Those that a server runs itself are not there."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: Text
    description: LongText | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class TextFormat(Model):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Text | None, BeforeValidator(none_if_empty)] = None
    description: LongText | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Model):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class NamedFunctionTool(Model):
    """`tool_choice` as an object."""

    type: Literal["function"]
    name: Text


class ResponsesRequest(Model):
    """A request of the Responses API."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text
    input: Annotated[tuple[Item, ...], BeforeValidator(_input)] = Field(min_length=1, max_length=16_384)
    instructions: LongText | None = None
    tools: tuple[FunctionTool, ...] | None = Field(default=None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: tuple[Text, ...] | None = None
    metadata: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    """vLLM's extension, as in chat."""

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def parse_responses(body: bytes, choices_max: int, values_max: int) -> tuple[ResponsesRequest, ChatRequest]:
    """Raises `ApiError` 400 that names the field at fault, 413 for more than `values_max` JSON values."""
    check_values(body, values_max, "gateway.json_values_max sets the bound")
    request = parse(ResponsesRequest, body)
    for name, value in (request.model_extra or {}).items():
        _check_extra(name, value)
    for unknown in set(request.include or ()) - {LOGPROBS}:
        raise ApiError(400, "unsupported_field", f"include: {unknown!r} is not there; {LOGPROBS!r} is", "include")
    for number, tool in enumerate(request.tools or ()):
        for name, value in (tool.model_extra or {}).items():
            if says_something(value) and value is not False:
                raise ApiError(
                    400, "unsupported_field", f"tools.{number}.{name}: not supported here", f"tools.{number}"
                )
    try:
        return request, parse_chat(to_json(_chat_body(request)), choices_max, 4 * values_max)
    except ApiError as error:
        raise _in_our_words(error) from None


def _chat_body(request: ResponsesRequest) -> Json:
    said: tuple[Item, ...] = request.input
    if request.instructions:
        said = (MessageItem(role="system", content=request.instructions), *said)
    extra = request.model_extra or {}
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages_of(said),
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": _choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _format(request.text.format) if request.text else None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.shows_logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "metadata": request.metadata,
        "chat_template_kwargs": request.chat_template_kwargs,
        **{name: extra[name] for name in HARMLESS if name in extra},
    }
    return {name: value for name, value in body.items() if value is not None}


def _tool(tool: FunctionTool) -> Json:
    function = tool.model_dump(mode="json", exclude_none=True, include={"name", "description", "parameters", "strict"})
    return {"type": "function", "function": function}


def _choice(request: ResponsesRequest) -> JsonValue:
    choice = request.tool_choice
    if isinstance(choice, NamedFunctionTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _format(asked: TextFormat | None) -> Json | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": asked.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"type"}),
    }


def _check_extra(name: str, value: JsonValue) -> None:
    if name in HARMLESS or not says_something(value):
        return
    if name not in NEUTRAL:
        raise unknown_field(name, [*ResponsesRequest.model_fields, *HARMLESS, *NEUTRAL])
    if value not in NEUTRAL[name]:
        reason = _WHY.get(name, "there is nothing here that would do it")
        raise ApiError(400, "unsupported_field", f"{name}: not supported here, leave it out; {reason}", name)


def _in_our_words(error: ApiError) -> ApiError:
    """The field as this API calls it. Places inside of `input` are none of `messages`."""
    name = (error.param or "").partition(".")[0]
    if name not in _CHAT_NAMES:
        return error
    ours = _CHAT_NAMES[name]
    _, _, reason = str(error).partition(": ")
    return ApiError(error.status, error.code, f"{ours}: {reason or error}", ours)
