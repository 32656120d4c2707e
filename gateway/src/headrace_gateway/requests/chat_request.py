"""The body of `POST /v1/chat/completions`: its fields, the fields that `tools` replaced, and further fields of clients,
which are harmless, ignored (`HINTS`) or refused by name.

Requests are translated into requests with tools. Messages of this form have no ids of calls, so a call gets the
position of its message as its id. A replica knows the call by another id, so it gets the exact tokens from the gateway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.chat_messages import ChatMessage, EchoedToolCall, ReadMessage, is_non_empty
from headrace_gateway.requests.engine_wire import EngineMessage
from headrace_gateway.requests.http_request import check_values, parse, unknown_field
from headrace_gateway.requests.request_context import (
    ENABLE_THINKING,
    HINTS,
    RequestContext,
    is_thinking_switch,
    thinking_switch,
)
from headrace_schemas import Sampling, Tool
from headrace_schemas.events.chat import FunctionDefinition, LogitBias
from headrace_schemas.http.answer_form import (
    RESPONSE_FORMAT,
    TOOL_CHOICE,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ToolChoice,
    check_choice,
    constrained_fields,
    grammar_of,
    requires_call,
    unenforced_keywords,
)
from headrace_schemas.http.replica_api import RawPrompt
from headrace_schemas.values.base import Finite, Model, Text
from headrace_schemas.values.bounds import INT32, PROMPT_MESSAGES_MAX, SAMPLING, JsonObject
from headrace_schemas.values.text import stop_strings

FUNCTION_CALL = "function_call"
"""Finish reason and message field of a call whose request has `functions`."""
HARMLESS = frozenset(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"))
"""Fields that do not change the sampled distribution. Any value is accepted."""

NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "best_of": (1,),
    "top_a": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "structured_outputs": (),
}
"""Fields of OpenAI's and vLLM's APIs that the gateway cannot apply, with their values that have no effect. Empty values
have no effect either.

Most of them would change the sampled distribution in ways that a `Turn` does not record.
"""


def with_tools(request: ChatRequest) -> ChatRequest:
    """Return the request with its deprecated `functions` converted to `tools`. Raises `ApiError` 400 if it has both."""
    changes: dict[str, Any] = {}
    if any(message.role == "function" or message.function_call for message in request.messages):
        changes = {"messages": _messages_with_tools(request.messages), "functions": request.functions or ()}
    if request.functions:
        if request.tools or request.tool_choice is not None:
            raise ApiError(
                400, "invalid_value", "functions: must not be sent together with tools; send one of them", "functions"
            )
        changes["tools"] = tuple(Tool(function=function) for function in request.functions)
        changes["parallel_tool_calls"] = False
    choice = _choice(request)
    if choice is not None and request.functions:
        changes["tool_choice"] = choice
    return request.model_copy(update=changes) if changes else request


def old_fields(message: EngineMessage) -> dict[str, JsonValue]:
    """Return OpenAI's deprecated field `function_call` with the first tool call of an answer or delta; an empty mapping
    without a call.

    The deprecated format has room for one call. The turn records all of them.
    """
    first = next((call.function for index, call in message.indexed_calls if index == 0), None)
    return {} if first is None else {FUNCTION_CALL: first.model_dump(exclude_none=True)}


def _choice(request: ChatRequest) -> ToolChoice:
    choice = request.function_call
    if choice is None or isinstance(choice, str):
        return choice
    if choice.name not in {function.name for function in request.functions or ()}:
        message = f"{FUNCTION_CALL}: names a function that is not among the functions"
        raise ApiError(400, "invalid_value", message, FUNCTION_CALL)
    return NamedTool(type="function", function=choice)


def _messages_with_tools(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    translated = []
    call_id = "call_0"
    for position, message in enumerate(messages):
        changes: dict[str, object] = {}
        if message.role == "function":
            changes = {"role": "tool", "tool_call_id": call_id}
        elif message.function_call is not None:
            call_id = f"call_{position}"
            changes = {"tool_calls": (EchoedToolCall(id=call_id, function=message.function_call),)}
        translated.append(message.model_copy(update={**changes, FUNCTION_CALL: None}) if changes else message)
    return tuple(translated)


class StreamOptions(Model):
    """Request field `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against traffic analysis. It is accepted, but the gateway sends none."""


def _function_choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto"):
        raise ValueError("must be 'none', 'auto' or {'name': ...}")
    return value


FunctionChoice = Annotated[Literal["none", "auto"] | NamedFunction | None, BeforeValidator(_function_choice)]
"""Request field `function_call`."""


class ChatRequest(Model):
    """Body of `POST /v1/chat/completions`, built by `parse_chat`. Fields that are not declared here are never sent to a
    replica."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text
    messages: tuple[ReadMessage, ...] = Field(min_length=1, max_length=PROMPT_MESSAGES_MAX)
    tools: tuple[Tool, ...] | None = Field(default=None, max_length=1024)
    tool_choice: ToolChoice = None
    functions: tuple[FunctionDefinition, ...] | None = Field(default=None, max_length=1024)
    function_call: FunctionChoice = None
    """Deprecated forms of `tools` and `tool_choice`."""
    parallel_tool_calls: bool | None = None
    """If false, a forced call is a single one. Otherwise the model decides how many calls it makes."""
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[Finite, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0), SAMPLING] | None = None
    top_k: Annotated[int, Field(ge=-1), INT32] | None = None
    min_p: Annotated[Finite, Field(ge=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1), INT32] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1), INT32] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[Text, ...] | None, Field(max_length=16), BeforeValidator(stop_strings)] = None
    presence_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: LogitBias | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    """Whether the answer contains token ids, an extension of vLLM."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, for example `enable_thinking`, an extension of vLLM."""
    metadata: JsonObject | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of the client, with OpenAI's defaults for the others."""
        fields: dict[str, Any] = {
            "grammar": grammar_of(self.response_format, self.tool_choice),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_tokens": self.max_tokens or self.max_completion_tokens,
            "seed": self.seed,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
        }
        return Sampling.model_validate({name: value for name, value in fields.items() if value is not None})

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that a replica must announce in `Replica.grammars` to serve this request."""
        return constrained_fields(self.response_format, self.tool_choice)

    @property
    def raw_prompt(self) -> RawPrompt | None:
        """Prompt that is used without the chat template, for a text completion; None for a chat."""
        return None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def user(self) -> JsonValue:
        """User id that the client sends in either of OpenAI's fields."""
        extra = self.model_extra or {}
        return extra.get("safety_identifier") or extra.get("user")


def parse_chat(body: bytes, context: RequestContext) -> ChatRequest:
    """Parse a body of `POST /v1/chat/completions`, and record its ignored fields in `context`.

    Raises:
        ApiError: 400 that names the field at fault, 413 for more JSON values than the rules allow.
    """
    rules = context.rules
    check_values(body, rules.json_values_max, "send a smaller request")
    return check_chat_request(with_tools(parse(ChatRequest, body, context=context)), context)


def check_chat_request(request: ChatRequest, context: RequestContext) -> ChatRequest:
    """Check the fields of a chat request, and return it.

    If one of its fields switches thinking on or off, for example `reasoning_effort`, the returned request has the
    variable `enable_thinking` of the chat template.

    Raises:
        ApiError: 400, a field has a value that is not supported.
    """
    extra = request.model_extra or {}
    for name, value in extra.items():
        _check_extra(name, value, context)
    switch = thinking_switch(extra, context)
    if switch is not None:
        arguments = {ENABLE_THINKING: switch, **(request.chat_template_kwargs or {})}
        request = request.model_copy(update={"chat_template_kwargs": arguments})
    try:
        check_choice(request.tool_choice, {tool.function.name for tool in request.tools or ()})
    except ValueError as error:
        raise ApiError(400, "invalid_value", str(error), TOOL_CHOICE) from None
    _report_unenforced_keywords(request, context)
    if request.choices > context.rules.choices_max:
        message = f"n: at most {context.rules.choices_max} choices can be requested here"
        raise ApiError(400, "invalid_value", message, "n")
    return request


def _report_unenforced_keywords(request: ChatRequest, context: RequestContext) -> None:
    """Record in `context` the keywords of the JSON schema that the answer may violate. The schema is not `strict`, and
    no grammar can enforce these keywords."""
    schemas: list[tuple[str, JsonValue]] = []
    if requires_call(request.tool_choice):
        functions = [tool.function for tool in request.tools or ()]
        schemas = [("tools", function.parameters) for function in functions if not function.strict]
    elif request.response_format is not None and not request.response_format.strict:
        schemas = [(RESPONSE_FORMAT, request.response_format.required_schema)]
    for field, schema in schemas:
        for keyword in sorted(unenforced_keywords(schema)):
            context.ignore(f"{field}.{keyword}", "no grammar can hold an answer to it")


def _check_extra(name: str, value: JsonValue, context: RequestContext) -> None:
    if name in HARMLESS or not is_non_empty(value) or value in NEUTRAL.get(name, ()) or is_thinking_switch(name, value):
        return
    if name in HINTS:
        context.ignore(name, HINTS[name])
        return
    if name not in NEUTRAL:
        raise unknown_field(name, [*ChatRequest.model_fields, *HARMLESS, *NEUTRAL])
    reason = _REASONS.get(name, "it would change what is sampled without a record of it")
    raise ApiError(400, "unsupported_field", f"{name}: not supported here, leave it out; {reason}", name)


_REASONS = {
    "modalities": "only text is served",
    "audio": "only text is served",
    "web_search_options": "offer a search tool instead",
    "prompt_logprobs": "only sampled tokens have logprobs",
}
