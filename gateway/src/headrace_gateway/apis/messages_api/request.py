"""The body of `POST /v1/messages` and of `/v1/messages/count_tokens`, and its translation into a `ChatRequest`."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, JsonValue
from pydantic_core import from_json, to_json

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.messages_api.blocks import Json, MessageParam, SystemContent, chat_messages
from headrace_gateway.requests.chat_messages import is_non_empty
from headrace_gateway.requests.chat_request import ChatRequest, parse_chat
from headrace_gateway.requests.http_request import check_values, parse, unknown_field
from headrace_gateway.requests.identity import CLIENT_SESSION
from headrace_gateway.requests.request_context import HINTS, RequestContext, is_thinking_switch
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import PROMPT_MESSAGES_MAX, JsonObject
from headrace_schemas.values.text import closest

REFUSED: dict[str, str] = {
    "mcp_servers": "the gateway calls no tools; connect them in the client",
    "container": "there is no code execution; offer a tool",
    "fallbacks": "another model would answer; call it by its name",
}
"""Fields that would change the meaning of the call, with the reason for their refusal."""
_CHAT_NAMES = {
    "max_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "n": "model",
}
"""Names that this API has for the fields of a chat request, for error messages."""
_THINKING = "thinking"
_CLAUDE_CODE_USER = re.compile(r"user_([0-9a-f]{16,64})_account_([0-9a-f-]*)_session_([0-9a-f-]{36})")
_TOOL_FIELDS = ("strict", "cache_control")


class ToolParam(Model):
    """A tool of the request. Only tools that the request describes with a schema (`custom`) are offered to the
    model."""

    model_config = ConfigDict(extra="allow")

    type: Text | None = None
    name: Text | None = None
    description: LongText | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the request describes the tool itself. Other types name tools that Anthropic's servers define."""
        return self.type in (None, "custom")


class ToolChoiceParam(Model):
    """Request field `tool_choice`: which tools the model may or must call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Model):
    """Request field `output_config.format`: the JSON schema that the answer must fit."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Model):
    """Request field `output_config`. Of its levels of `effort`, only those without thinking have an effect."""

    model_config = ConfigDict(extra="allow")

    format: OutputFormat | None = None


class CountRequest(Model):
    """Body of `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text
    messages: tuple[MessageParam, ...] = Field(min_length=1, max_length=PROMPT_MESSAGES_MAX)
    system: SystemContent | None = None
    tools: tuple[ToolParam, ...] | None = Field(default=None, max_length=1024)
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    metadata: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, an extension that vLLM also accepts in chat requests."""


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: tuple[Text, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def parse_messages(body: bytes, context: RequestContext) -> tuple[MessagesRequest, ChatRequest]:
    """Parse a body of `POST /v1/messages`, and translate it to a chat request. Return both.

    Raises:
        ApiError: 400 that names the field at fault, 413 for more JSON values than the rules allow.
    """
    check_values(body, context.rules.json_values_max, "send a smaller request")
    request = parse(MessagesRequest, body, context=context)
    sampling: Json = {
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": list(request.stop_sequences or ()) or None,
    }
    return request, _chat_request(request, sampling, context)


def parse_count(body: bytes, context: RequestContext) -> ChatRequest:
    """Parse a body of `POST /v1/messages/count_tokens` to the chat request whose prompt tokens are counted. Raises
    `ApiError`."""
    check_values(body, context.rules.json_values_max, "send a smaller request")
    request = parse(CountRequest, body, context=context)
    without_form = request.model_copy(update={"output_config": None})
    if request.tool_choice is not None and request.tool_choice.type != "none":
        without_form = without_form.model_copy(update={"tool_choice": None})
    return _chat_request(without_form, {"max_tokens": 1}, context)


def _chat_request(request: CountRequest, sampling: Json, context: RequestContext) -> ChatRequest:
    extra = request.model_extra or {}
    for name, value in extra.items():
        _check_extra(name, value, context)
    config = request.output_config
    for name, value in ((config.model_extra if config else None) or {}).items():
        if is_non_empty(value) and not (name == "effort" and value in ("none", "minimal")):
            context.ignore(f"output_config.{name}", HINTS["output_config"])
    try:
        messages = chat_messages(request.system or (), request.messages, context)
    except ValueError as error:
        raise ApiError(400, "invalid_value", str(error), "messages") from None
    if not messages or messages[-1]["role"] == "assistant":
        message = "messages: the conversation must end with a user message; an answer cannot be prefilled"
        raise ApiError(400, "unsupported_field", message, "messages")
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": _tools(request.tools or (), context) or None,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": False if _is_single_call(request.tool_choice) else None,
        "response_format": _response_format(config),
        "metadata": _metadata(request.metadata),
        "chat_template_kwargs": request.chat_template_kwargs,
        _THINKING: extra.get(_THINKING) if is_thinking_switch(_THINKING, extra.get(_THINKING)) else None,
        **sampling,
    }
    document = to_json({name: value for name, value in body.items() if value is not None})
    try:
        return parse_chat(document, context.for_translation())
    except ApiError as error:
        raise error.with_client_names(_CHAT_NAMES) from None


def _check_extra(name: str, value: JsonValue, context: RequestContext) -> None:
    """Check a request field that the API does not declare: refuse it if it looks misspelt, else record it as ignored.

    Fields of unknown betas are accepted, because most of them are optional.
    """
    if not is_non_empty(value) or is_thinking_switch(name, value):
        return
    if name in REFUSED:
        message = f"{name}: not supported here, leave it out; {REFUSED[name]}"
        raise ApiError(400, "unsupported_field", message, name)
    known_fields = [*MessagesRequest.model_fields, _THINKING]
    if name not in HINTS and (context.rules.strict or closest(name, known_fields, cutoff=0.8)):
        raise unknown_field(name, known_fields)
    context.ignore(name, HINTS.get(name, "the field is not known here"))


def _tools(tools: tuple[ToolParam, ...], context: RequestContext) -> list[Json]:
    """Return the request's own tools as functions of a chat request. Tools that Anthropic's servers define are recorded
    as ignored."""
    functions: list[Json] = []
    for number, tool in enumerate(tools):
        if not tool.is_custom:
            context.ignore(f"tools.{tool.type}", "only tools with an input_schema can be offered to a model")
            continue
        if tool.name is None or tool.input_schema is None:
            field = f"tools.{number}.{'name' if tool.name is None else 'input_schema'}"
            raise ApiError(400, "missing_field", f"{field}: Field required", field)
        for name, value in (tool.model_extra or {}).items():
            if is_non_empty(value) and value is not False and name not in _TOOL_FIELDS:
                context.ignore(f"tools.{name}")
        function: Json = {"name": tool.name, "parameters": tool.input_schema}
        for name in ("description", "strict"):
            if getattr(tool, name) is not None:
                function[name] = getattr(tool, name)
        functions.append({"type": "function", "function": function})
    return functions


def _choice(choice: ToolChoiceParam | None) -> JsonValue:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _is_single_call(choice: ToolChoiceParam | None) -> bool:
    return choice is not None and choice.disable_parallel_tool_use is True


def _response_format(config: OutputConfig | None) -> Json | None:
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.schema_}}


def _metadata(metadata: JsonObject | None) -> Json | None:
    """Return the labels of the call (user and session) from the request's `metadata`. Claude Code's `user_id` contains
    both, as JSON or, in earlier releases, as one word."""
    labels: Json = dict(metadata or {})
    user = labels.get("user_id")
    if not isinstance(user, str):
        return labels or None
    word = _CLAUDE_CODE_USER.fullmatch(user)
    if word is not None:
        labels |= {"user_id": word[2] or word[1], CLIENT_SESSION: word[3]}
    elif user.startswith("{"):
        try:
            parts = from_json(user)  # raises for lone surrogates, which a label must not contain
        except ValueError:
            return labels
        session = parts.get("session_id")
        person = parts.get("account_uuid") or parts.get("device_id")
        if isinstance(session, str) and session:
            labels[CLIENT_SESSION] = session
        if isinstance(person, str) and person:
            labels["user_id"] = person
    return labels
