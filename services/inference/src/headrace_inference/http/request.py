"""Body of `POST /v1/chat/completions`. Unknown and unsupported fields are refused with their names."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator

from headrace_inference.engine import Sampling
from headrace_inference.grammar.forms import AnswerForm, required_form
from headrace_runtime.errors import Refused
from headrace_runtime.kafka.wire import more_values_than
from headrace_schemas import Message, Tool
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN, LogitBias
from headrace_schemas.http.answer_form import TOOL_CHOICE, ResponseFormat, ToolChoice, check_choice, constrained_fields
from headrace_schemas.http.replica_api import History, RawPrompt, Resume, ResumedChoice
from headrace_schemas.values.base import Finite, Model, Text
from headrace_schemas.values.plain_values import none_if_empty, stop_strings

_TOP_LOGPROBS_MAX = 20
_STOPS_MAX = 16
_INT32_MAX = 2**31 - 1


class StreamOptions(Model):
    """`stream_options`."""

    include_usage: bool = False


class ChatMessage(Message):
    """A message with further fields that SDKs send back with answers. They must be empty."""

    name: Annotated[Text | None, BeforeValidator(none_if_empty)] = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: tuple[()] | None = None


class ChatRequest(Model):
    """A chat completion request. Lists and numbers have OpenAI's ranges."""

    model_config = ConfigDict(strict=True)

    model: Text
    messages: tuple[ChatMessage, ...] = Field(min_length=1, max_length=8192)
    tools: tuple[Tool, ...] | None = Field(default=None, max_length=1024)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    """`false` limits a forced call to one. Otherwise the model determines the number of calls."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[Finite, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[Text, ...] | None, Field(max_length=_STOPS_MAX), BeforeValidator(stop_strings)] = None
    ignore_eos: bool | None = None
    """vLLM's extension: continue past the end of the turn, up to `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_TOP_LOGPROBS_MAX)] | None = None
    return_token_ids: bool | None = None
    """vLLM's extension: return `prompt_token_ids` and `choices[].token_ids`."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """vLLM's extension: variables for the chat template."""
    response_format: ResponseFormat | None = None
    cache_salt: Text | None = None
    """vLLM's extension: the cached KV of a prompt is reused only for requests with the same salt."""
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    """`user` and `metadata` are labels without an effect."""
    headrace_resume: Resume | None = None
    headrace_history: History | None = None
    headrace_prompt: RawPrompt | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.headrace_resume and not self.stream:
            raise ValueError("headrace_resume needs stream: true")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.headrace_prompt and (len(self.messages) > 1 or self.tools or self.form or self.headrace_history):
            raise ValueError("headrace_prompt needs a single message, without tools, response_format and history")
        if self.ignore_eos and constrained_fields(self.response_format, self.tool_choice):
            raise ValueError("ignore_eos cannot be combined with response_format or a forced call; leave it out")
        return self

    @property
    def choices(self) -> int:
        """Number of choices."""
        return self.n or 1

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Tools that the prompt contains: none if `tool_choice` is `none`."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def form(self) -> AnswerForm | None:
        """Form that the answers must have; None if any answer is allowed."""
        several = self.parallel_tool_calls is not False
        return required_form(self.response_format, self.tool_choice, self.offered_tools, several=several)

    @property
    def resumed(self) -> dict[int, ResumedChoice]:
        """Choices that another replica began, by index."""
        return {choice.index: choice for choice in self.headrace_resume.choices} if self.headrace_resume else {}

    @property
    def resumed_prompt(self) -> tuple[int, ...] | None:
        """Token ids of the prompt after which the resumed tokens were sampled, if the request has them."""
        return self.headrace_resume.prompt_token_ids if self.headrace_resume else None

    def sampling(self, stop_ids: frozenset[int]) -> Sampling:
        """Return the sampling parameters, with OpenAI's defaults instead of the model's `generation_config`.

        A temperature below `SAMPLED_TEMPERATURE_MIN` is greedy.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            max_tokens=self.max_tokens or self.max_completion_tokens,
            temperature=temperature if temperature >= SAMPLED_TEMPERATURE_MIN else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            seed=self.seed,
            stop_ids=frozenset() if self.ignore_eos else stop_ids,
            top_logprobs=self.top_logprobs or 0,
        )


def parse(body: bytes, choices_max: int, values_max: int) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        Refused: 400 with the invalid field, but without its value, which may be user text; 413 if `body` has more than
            `values_max` JSON values.
    """
    if more_values_than(body, values_max):
        message = f"the request body has more than {values_max} JSON values"
        raise Refused(413, "too_many_values", message)
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise _refusal(problem["type"], ".".join(map(str, problem["loc"])), problem["msg"]) from None
    if request.choices > choices_max:
        raise Refused(400, "invalid_value", f"n: must be at most {choices_max}", "n")
    try:
        check_choice(request.tool_choice, {tool.function.name for tool in request.tools or ()})
    except ValueError as error:
        raise Refused(400, "invalid_value", str(error), TOOL_CHOICE) from None
    _check_resumed(request)
    return request


def _refusal(kind: str, field: str, message: str) -> Refused:
    if kind == "json_invalid":
        return Refused(400, "invalid_json", f"the body is not valid JSON: {message}")
    if kind == "extra_forbidden":
        return Refused(400, "unknown_field", f"{field}: unknown or unsupported field", field)
    return Refused(400, "invalid_value", f"{field or 'the body'}: {message}", field or None)


def _check_resumed(request: ChatRequest) -> None:
    beyond = [index for index in request.resumed if index >= request.choices]
    if beyond:
        message = f"headrace_resume: there is no choice {beyond[0]}, n is {request.choices}"
        raise Refused(400, "invalid_value", message, "headrace_resume")
