"""The wire format of `POST /v1/chat/completions`: the request's body, whose unknown and unsupported fields are refused
with their names, and JSON of responses in the format of a vLLM server (vLLM 0.32, `return_token_ids`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import to_json

from headrace_inference.chat.answer import Delta
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Sampling, Tokens
from headrace_inference.grammar.forms import AnswerForm, required_form
from headrace_runtime.errors import Refused
from headrace_runtime.kafka.wire import exceeds_value_limits
from headrace_schemas import Message, Tool
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN, LogitBias
from headrace_schemas.http.answer_form import TOOL_CHOICE, ResponseFormat, ToolChoice, check_choice, constrained_fields
from headrace_schemas.http.replica_api import PROMPT_TEXT_FIELD, History, RawPrompt, Resume, ResumedChoice
from headrace_schemas.values.base import Finite, Model, Text
from headrace_schemas.values.text import none_if_empty, stop_strings

_TOP_LOGPROBS_MAX = 20
_STOPS_MAX = 16
_INT32_MAX = 2**31 - 1


class StreamOptions(Model):
    """`stream_options`."""

    include_usage: bool = False


class ChatMessage(Message):
    """A message of a request. SDKs send some further fields back with an earlier answer, which must be empty."""

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
            raise ValueError("top_logprobs: needs logprobs: true")
        if self.headrace_resume and not self.stream:
            raise ValueError("headrace_resume: needs stream: true")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: needs stream: true")
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
        """Choices whose sampling began on another replica that failed, by index; this replica continues them."""
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
    if exceeds_value_limits(body, values_max):
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


Json = dict[str, Any]

_PORTION = 256
"""Tokens whose logprobs are serialized in one call."""

IMPOSSIBLE = -9999.0
"""Logprob that OpenAI and vLLM report for a token that could not be sampled. JSON has no infinity."""


@dataclass(frozen=True)
class ResponseFormatter:
    """Formatter of one response.

    `model` is the version that the engine used, which may differ from the requested alias.
    """

    tokenizer: ChatTokenizer
    model: str
    token_ids: bool
    logprobs: bool
    grammar: Json | None = None
    """The grammar that the answers are sampled with (`headrace_schemas.TokenGrammar`)."""
    prompt_text: str | None = None
    """The text of a prompt that came as token ids."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, prompt_ids: Sequence[int], choices: Sequence[bytes], usage: Json) -> bytes:
        """Return a response that is not streamed. `choices` are already JSON."""
        body = self._frame("chat.completion", [])
        del body["choices"]
        body["usage"] = usage
        body |= self._about_prompt(prompt_ids)
        return b"".join([to_json(body)[:-1], b',"choices":[', b",".join(choices), b"]}"])

    def choice(self, tokens: Tokens, message: Message, finish: str) -> bytes:
        """Return one choice of a response that is not streamed.

        Logprobs are serialized in portions, because the serializer keeps the interpreter's lock.
        """
        fields = message.model_dump(mode="json", exclude_none=True)
        fields.setdefault("content", None)
        body: Json = {"index": tokens.choice, "message": fields, "finish_reason": finish}
        body |= self._token_fields(tokens)
        if not self.logprobs:
            return to_json(body | {"logprobs": None})
        ends = range(0, len(tokens.token_ids), _PORTION)
        entries = [to_json(self._logprobs(tokens, begin, begin + _PORTION))[1:-1] for begin in ends]
        return b"".join([to_json(body)[:-1], b',"logprobs":{"content":[', b",".join(entries), b"]}}"])

    def opening(self, choice: int, prompt_ids: Sequence[int], *, first: bool) -> bytes:
        """Return the chunk that opens a choice. With `first` it also contains the prompt's token ids."""
        delta = {"role": "assistant", "content": ""}
        opened: Json = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._frame("chat.completion.chunk", [opened])
        return _event(body | self._about_prompt(prompt_ids) if first else body)

    def prompt(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the chunk with the prompt's token ids for a stream that opens no choice."""
        return _event(self._frame("chat.completion.chunk", []) | self._about_prompt(prompt_ids))

    def chunk(self, tokens: Tokens, delta: Delta, first_call: int, finish: str | None) -> bytes:
        """Return a chunk with new tokens of a choice and `delta`, the text that they complete, which may be empty."""
        fields: Json = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        if delta.calls:
            calls = enumerate(delta.calls, first_call)
            fields["tool_calls"] = [{"index": index, **call.model_dump(mode="json")} for index, call in calls]
        choice = {"index": tokens.choice, "delta": fields, "finish_reason": finish}
        return _event(self._frame("chat.completion.chunk", [self._with_tokens(choice, tokens)]))

    def usage(self, usage: Json) -> bytes:
        """Return the chunk with the usage block."""
        return _event({**self._frame("chat.completion.chunk", []), "usage": usage})

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _about_prompt(self, prompt_ids: Sequence[int]) -> Json:
        if not self.token_ids:
            return {}
        grammar = {} if self.grammar is None else {"headrace_grammar": self.grammar}
        text = {} if self.prompt_text is None else {PROMPT_TEXT_FIELD: self.prompt_text}
        return {"prompt_token_ids": prompt_ids, **grammar, **text}

    def _with_tokens(self, choice: Json, tokens: Tokens) -> Json:
        choice["logprobs"] = {"content": self._logprobs(tokens, 0, len(tokens.token_ids))} if self.logprobs else None
        return choice | self._token_fields(tokens)

    def _token_fields(self, tokens: Tokens) -> Json:
        if not self.token_ids:
            return {}
        sets = {} if tokens.sets is None else {"headrace_stored_sets": tokens.sets}
        return {"token_ids": tokens.token_ids, **sets}

    def _logprobs(self, tokens: Tokens, begin: int, end: int) -> list[Json]:
        tops = tokens.top or [[]] * len(tokens.token_ids)
        parts = (tokens.token_ids[begin:end], tokens.logprobs[begin:end], tops[begin:end])
        return [
            {**self._token(token, logprob), "top_logprobs": [self._token(*other) for other in top]}
            for token, logprob, top in zip(*parts, strict=True)
        ]

    def _token(self, token: int, logprob: float) -> Json:
        token_text = self.tokenizer.token(token)
        return {"token": token_text.text, "logprob": max(logprob, IMPOSSIBLE), "bytes": token_text.bytes}


DONE = b"data: [DONE]\n\n"


def error_event(message: str, code: str) -> bytes:
    """Return the last event of a stream that failed. No `[DONE]` follows it."""
    return _event({"error": {"message": message, "type": "server_error", "code": code, "param": None}})


def usage(prompt: int, completion: int, cached: int) -> Json:
    """Return the usage block for these numbers of prompt, completion and cached prompt tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _event(body: Json) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
