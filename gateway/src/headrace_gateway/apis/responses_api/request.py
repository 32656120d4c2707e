"""The body of `POST /v1/responses` and of `/v1/responses/input_tokens`, and its translation into a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import to_json

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.responses_api.items import (
    Item,
    Json,
    MessageItem,
    ReferenceItem,
    ToolsItem,
    begins_with_answer,
    messages_of,
    size_of,
)
from headrace_gateway.apis.responses_api.tools import RequestTool, ToolSet
from headrace_gateway.requests.chat_messages import is_non_empty
from headrace_gateway.requests.chat_request import HARMLESS, ChatRequest, parse_chat
from headrace_gateway.requests.http_request import check_values, parse, unknown_field
from headrace_gateway.requests.identity import CLIENT_SESSION
from headrace_gateway.requests.request_context import HINTS, RequestContext, is_thinking_switch
from headrace_gateway.requests.response_store import EarlierItems
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import JsonObject
from headrace_schemas.values.text import none_if_empty

NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "prompt": (),
    "max_tool_calls": (),
    "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
    "image": (),
}
"""Fields that the gateway cannot apply, with their values that have no effect. Empty values have no effect either."""
_REASONS = {
    "background": "the answer comes with the response",
    "prompt": "no prompts are stored; send instructions",
}
_CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "n": "model",
}
"""Names that this API has for the fields of a chat request, for error messages."""
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return ({"type": "message", "role": "user", "content": value},)
    return tuple(value) if isinstance(value, list) else value


def _conversation(value: Any) -> Any:
    """Return the id of the conversation. Clients send it as a text or as an object with `id`."""
    return value.get("id", value) if isinstance(value, dict) else value


class TextFormat(Model):
    """Request field `text.format`: the form that the answer must have, such as a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Text | None, BeforeValidator(none_if_empty)] = None
    description: LongText | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Model):
    """Request field `text`: settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class NamedTool(Model):
    """Form of the request field `tool_choice` that forces the model to call one tool."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function", "custom"]
    name: Text


class AllowedTools(Model):
    """Form of the request field `tool_choice` by which the model may call only some of the offered tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: tuple[JsonObject, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools that may be called."""
        return frozenset(name for tool in self.tools if isinstance(name := tool.get("name"), str))


class ResponsesRequest(Model):
    """Body of `POST /v1/responses`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text
    input: Annotated[tuple[Item, ...], BeforeValidator(_input)] = Field(min_length=1, max_length=16_384)
    instructions: LongText | None = None
    previous_response_id: Text | None = None
    conversation: Annotated[Text | None, BeforeValidator(_conversation)] = None
    store: bool | None = None
    tools: tuple[RequestTool, ...] | None = Field(default=None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: JsonObject | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: tuple[Text, ...] | None = None
    metadata: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, an extension that vLLM also accepts in chat requests."""

    @property
    def shows_logprobs(self) -> bool:
        """Whether the client requested logprobs."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def encrypts_reasoning(self) -> bool:
        """Whether the client requested that reasoning items also have `encrypted_content`."""
        return ENCRYPTED_REASONING in (self.include or ())


@dataclass(frozen=True, slots=True)
class ParsedResponses:
    """A parsed request of the Responses API, with its translation to a chat request."""

    request: ResponsesRequest
    added: tuple[Item, ...]
    """Items of the request's `input`, with references replaced by the stored items."""
    added_bytes: int
    """Number of bytes of `added` as JSON."""
    added_messages: int
    """Number of chat messages that consist of items of `added` alone; 0 if the first of them also contains earlier
    items."""
    tools: ToolSet
    chat: ChatRequest


def parse_responses(body: bytes, context: RequestContext) -> ParsedResponses:
    """Parse a body of `POST /v1/responses`, and translate it to a chat request.

    Raises:
        ApiError: 400 or 404 that names the field at fault, 413 for more JSON values than the rules allow.
    """
    request = _request(body, context)
    return _translated(request, context)


def parse_input_tokens(body: bytes, context: RequestContext) -> ChatRequest:
    """Parse a body of `POST /v1/responses/input_tokens` to the chat request whose prompt tokens are counted. Raises
    `ApiError`."""
    request = _request(body, context)
    changes: dict[str, Any] = {"max_output_tokens": 1, "stream": None, "text": None}
    if request.tool_choice != "none":
        changes["tool_choice"] = None
    return _translated(request.model_copy(update=changes), context).chat


def _request(body: bytes, context: RequestContext) -> ResponsesRequest:
    check_values(body, context.rules.json_values_max, "send a smaller request")
    request = parse(ResponsesRequest, body, context=context)
    for name, value in (request.model_extra or {}).items():
        _check_extra(name, value, context)
    for name in request.include or ():
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            context.ignore("include", HINTS["include"])
    if request.text and request.text.verbosity not in (None, "medium"):
        context.ignore("text.verbosity", HINTS["verbosity"])
    for name, value in (request.reasoning or {}).items():
        if is_non_empty(value) and not is_thinking_switch("reasoning", {name: value}):
            context.ignore(f"reasoning.{name}", HINTS["reasoning"])
    return request


def _translated(request: ResponsesRequest, context: RequestContext) -> ParsedResponses:
    added = tuple(resolve_item(item, f"input.{number}", context) for number, item in enumerate(request.input))
    earlier = _earlier(request, context)
    items = (*earlier.items, *added)
    added_bytes = 0
    for item in added:
        added_bytes += size_of((item,))
        if earlier.size_bytes + added_bytes > context.bytes_max:
            raise _too_large(request, context)
    context.referred_bytes = earlier.size_bytes + added_bytes
    offered = [tool for item in items if isinstance(item, ToolsItem) for tool in item.tools]
    choice = request.tool_choice
    mode = choice.mode if isinstance(choice, AllowedTools) else choice
    is_forced = mode == "required" or isinstance(choice, NamedTool)
    tools = ToolSet([*(request.tools or ()), *offered], context, is_forced=is_forced)
    try:
        document = to_json(_chat_body(request, items, tools))
        chat = parse_chat(document, context.for_translation())
    except ApiError as error:
        raise error.with_client_names(_CHAT_NAMES) from None
    added_messages = 0 if begins_with_answer(added) else len(messages_of(added))
    return ParsedResponses(request, added, added_bytes, added_messages, tools, chat)


def _earlier(request: ResponsesRequest, context: RequestContext) -> EarlierItems:
    """Return the stored items before those of the request, from its `conversation` or `previous_response_id`; none
    without these fields. Raises `ApiError`."""
    stored, previous_id = context.responses, request.previous_response_id
    if request.conversation is not None and previous_id is not None:
        message = "conversation: previous_response_id names the earlier items, too; send one of them"
        raise ApiError(400, "invalid_value", message, "conversation")
    if request.conversation is not None and stored is not None:
        conversation = stored.conversation(request.conversation)
        return EarlierItems(tuple(item for _, item in conversation.items), conversation.item_bytes)
    if previous_id is None:
        return EarlierItems((), 0)
    previous = stored.get(previous_id) if stored else None
    if previous is not None and previous.conversation_id is not None:
        message = "previous_response_id: the response is part of a conversation; send that as conversation"
        raise ApiError(400, "invalid_value", message, "previous_response_id")
    earlier = stored.items_up_to(previous_id) if stored else None
    if earlier is None:
        message = (
            "previous_response_id: no such response is stored here; send the earlier items in input. Responses are "
            "stored for a time unless store is false"
        )
        raise ApiError(400, "previous_response_not_found", message, "previous_response_id")
    return earlier


def _too_large(request: ResponsesRequest, context: RequestContext) -> ApiError:
    fields = ("conversation", "previous_response_id")
    field = next((name for name in fields if getattr(request, name) is not None), "input")
    message = f"{field}: the conversation with everything that it refers to is larger than {context.bytes_max} bytes"
    return ApiError(413, "body_too_large", message, field)


def resolve_item(item: Item, field: str, context: RequestContext) -> Item:
    """Return `item`, or the stored item if `item` is a reference. Raises `ApiError` 404 that names `field`."""
    if not isinstance(item, ReferenceItem):
        return item
    referenced: Item | None = context.responses.item(item.id) if context.responses else None
    if referenced is None:
        message = f"{field}: no item with this id is stored here; send the item itself"
        raise ApiError(404, "item_not_found", message, field)
    return referenced


def _chat_body(request: ResponsesRequest, items: Iterable[Item], tools: ToolSet) -> Json:
    if request.instructions:
        items = (MessageItem(role="system", content=request.instructions), *items)
    extra = request.model_extra or {}
    choice = request.tool_choice
    functions = tools.functions(choice.names if isinstance(choice, AllowedTools) else None)
    reasoning = {name: value for name, value in (request.reasoning or {}).items() if name in ("effort", "enabled")}
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages_of(items),
        "tools": functions or None,
        "tool_choice": _choice(request, functions),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _format(request.text.format) if request.text else None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.shows_logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "metadata": _labels(request),
        "chat_template_kwargs": request.chat_template_kwargs,
        "reasoning": reasoning if is_thinking_switch("reasoning", reasoning) else None,
        **{name: extra[name] for name in HARMLESS if name in extra},
    }
    return {name: value for name, value in body.items() if value is not None}


def _labels(request: ResponsesRequest) -> JsonValue:
    """Return the request's metadata. The conversation is added as the session, unless the client names another one."""
    if request.conversation is None:
        return request.metadata
    return {CLIENT_SESSION: request.conversation, **(request.metadata or {})}


def _choice(request: ResponsesRequest, functions: list[Json]) -> JsonValue:
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.mode
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    if choice == "required" or functions:
        return choice
    return None


def _format(text_format: TextFormat | None) -> Json | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": text_format.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"type"}),
    }


def _check_extra(name: str, value: JsonValue, context: RequestContext) -> None:
    if name in HARMLESS or not is_non_empty(value) or value in NEUTRAL.get(name, ()):
        return
    if name in HINTS:
        context.ignore(name, HINTS[name])
        return
    if name not in NEUTRAL:
        raise unknown_field(name, [*ResponsesRequest.model_fields, *HARMLESS, *NEUTRAL])
    reason = _REASONS.get(name, "there is nothing here that would do it")
    raise ApiError(400, "unsupported_field", f"{name}: not supported here, leave it out; {reason}", name)
