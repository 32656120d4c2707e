"""`POST /v1/completions`: continuation of a prompt that is used without a chat template, as text or as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import to_json

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.answers import AnswerShape, StreamedAnswer, answer_headers
from headrace_gateway.requests import client_connection
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_messages import is_non_empty
from headrace_gateway.requests.chat_request import HARMLESS, ChatRequest, StreamOptions, check_chat_request
from headrace_gateway.requests.chat_request import NEUTRAL as CHAT_NEUTRAL
from headrace_gateway.requests.engine_wire import EngineAnswer, EngineChoice, TokenLogprob
from headrace_gateway.requests.http_request import check_values, parse, refusal_of, unknown_field
from headrace_gateway.requests.request_context import HINTS, RequestContext
from headrace_schemas.events.routing import PROMPT
from headrace_schemas.http.replica_api import RawPrompt
from headrace_schemas.rules.turn_history import token_bytes
from headrace_schemas.values.base import Model, Text
from headrace_schemas.values.bounds import JsonObject

_MAX_TOKENS = 16
"""Default of `max_tokens` in OpenAI's API."""
_PROMPT_TOKENS_MAX = 1_048_576
_TOKEN_ID_END = 2**31
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"
)  # fmt: skip
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    **CHAT_NEUTRAL,
    "echo": (False,),
    "suffix": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
}
"""Fields of OpenAI's and vLLM's APIs that the gateway cannot apply, with their values that have no effect. Empty values
have no effect either."""
_REASONS = {
    "echo": "the client has the prompt, and its tokens have no logprobs",
    "suffix": "a text is continued at its end alone",
    "response_format": "POST /v1/chat/completions holds an answer to a form",
}


class _CompletionRequest(Model):
    """Body of `POST /v1/completions`. `_SAMPLING` names further fields that have an effect."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text
    prompt: JsonValue = None
    prompt_token_ids: JsonValue = None
    """Prompt as token ids. They may also be sent as `prompt`."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens at the beginning or the end of the text, an extension of vLLM."""
    max_tokens: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    metadata: JsonObject | None = None


class TextRequest(ChatRequest):
    """Request of `POST /v1/completions`, represented as a chat request whose prompt is used without the chat
    template.
    """

    raw: RawPrompt

    @property
    def raw_prompt(self) -> RawPrompt:
        return self.raw

    @property
    def needs(self) -> frozenset[str]:
        return frozenset((PROMPT,))


def read_completion(body: bytes, context: RequestContext) -> tuple[ChatRequest, AnswerShape]:
    """Parse a body of `POST /v1/completions` to a chat request and the format of its answers. Raises `ApiError` that
    names the field at fault."""
    others_max = context.rules.json_values_max
    check_values(body, _PROMPT_TOKENS_MAX + others_max, containers_max=others_max)
    request = parse(_CompletionRequest, body, context=context)
    extra = request.model_extra or {}
    for name, value in extra.items():
        _check_extra(name, value, context)
    text, token_ids = _prompt(request)
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": ({"role": "user", "content": text},),
        "raw": RawPrompt(token_ids=token_ids, add_special_tokens=request.add_special_tokens is not False),
        "max_tokens": _MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        "logprobs": request.logprobs is not None or None,
        "top_logprobs": request.logprobs or None,
        "stream": request.stream,
        "stream_options": request.stream_options,
        "return_token_ids": request.return_token_ids,
        "metadata": request.metadata,
        **{name: _with_token_keys(extra[name]) for name in (*_SAMPLING, *HARMLESS) if name in extra},
    }
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        chat = TextRequest.model_validate(present, context=context.for_validation())
    except ValidationError as error:
        raise refusal_of(error, TextRequest).with_client_names({"messages": "prompt"}) from None
    return check_chat_request(chat, context), TextCompletions()


def _with_token_keys(value: JsonValue) -> object:
    """Return `logit_bias` with its token ids as integers, because JSON has only text keys. Values in another form are
    returned unchanged."""
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdecimal() and len(key) < 20 else key: bias for key, bias in value.items()}


def _prompt(request: _CompletionRequest) -> tuple[str, tuple[int, ...] | None]:
    """Return the prompt as a text, and its token ids or None. Raises `ApiError`.

    If the client sent token ids, which only a replica can decode, the text is a digest of them.
    """
    field = "prompt" if request.prompt_token_ids is None else "prompt_token_ids"
    prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
    if request.prompt is not None and request.prompt_token_ids is not None:
        raise ApiError(
            400, "invalid_value", "prompt_token_ids: must not be sent together with prompt; send one of them", field
        )
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt and field == "prompt":
        return prompt, None
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "invalid_value", f"{field}: must be a text or a list of token ids that is not empty", field)
    if isinstance(prompt[0], str | list):
        message = f"{field}: holds {len(prompt)} prompts; send one request for each, so that each is a turn"
        raise ApiError(400, "invalid_value", message, field)
    ids = tuple(token for token in prompt if type(token) is int and 0 <= token < _TOKEN_ID_END)
    if len(ids) < len(prompt) or len(ids) > _PROMPT_TOKENS_MAX:
        message = f"{field}: must hold at most {_PROMPT_TOKENS_MAX} token ids, each from 0 to {_TOKEN_ID_END - 1}"
        raise ApiError(400, "invalid_value", message, field)
    return f"{len(ids)} token ids, SHA-256 {hashlib.sha256(token_bytes(ids)).hexdigest()}", ids


def _check_extra(name: str, value: JsonValue, context: RequestContext) -> None:
    if name in _SAMPLING or name in HARMLESS or not is_non_empty(value) or value in _NEUTRAL.get(name, ()):
        return
    if name in HINTS:
        context.ignore(name, HINTS[name])
        return
    if name not in _NEUTRAL:
        raise unknown_field(name, [*_CompletionRequest.model_fields, *_SAMPLING, *HARMLESS, *_NEUTRAL])
    reason = _REASONS.get(name, "it would change what is sampled without a record of it")
    raise ApiError(400, "unsupported_field", f"{name}: not supported here, leave it out; {reason}", name)


class TextCompletions:
    """Answers in the format of `POST /v1/completions`."""

    def headers(self, call: ChatCall) -> Mapping[str, str]:
        return answer_headers(call)

    def plain_body(self, call: ChatCall, answer: EngineAnswer) -> bytes:
        pieces = _Pieces(call)
        choices = [
            pieces.choice(choice, choice.message.content or "", answer.prompt_token_ids) for choice in answer.choices
        ]
        usage = answer.usage and answer.usage.model_dump(exclude_none=True)
        return to_json({**_head(call, answer.model), "choices": choices, "usage": usage})

    def streamed(self, call: ChatCall) -> StreamedAnswer:
        return _Chunks(call)


class _Chunks:
    """Encoder of one streamed text completion: each chunk of a replica becomes events."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        self._pieces = _Pieces(call)
        options = call.request.stream_options
        self._shows_usage = options is not None and options.include_usage
        self._prompt_ids: list[int] | None = None
        self._begun: set[int] = set()
        self.headers = answer_headers(call)
        self.ping = client_connection.COMMENT

    def events(self, chunk: EngineAnswer, version: str) -> bytes:
        self._prompt_ids = self._prompt_ids or chunk.prompt_token_ids
        choices = []
        for choice in chunk.choices:
            if choice.delta.content or choice.token_ids or choice.finish_reason:
                is_first = choice.index not in self._begun
                self._begun.add(choice.index)
                prompt_ids = self._prompt_ids if is_first else None
                choices.append(self._pieces.choice(choice, choice.delta.content or "", prompt_ids))
        head, usage = _head(self._call, version), {"usage": None} if self._shows_usage else {}
        events = client_connection.encode_event(to_json({**head, "choices": choices, **usage})) if choices else b""
        if self._shows_usage and chunk.usage is not None:
            counted = chunk.usage.model_dump(exclude_none=True)
            events += client_connection.encode_event(to_json({**head, "choices": [], "usage": counted}))
        return events

    def end(self) -> bytes:
        return client_connection.encode_event(client_connection.DONE)

    def error_event(self, error: ApiError) -> bytes:
        return client_connection.encode_event(error.body)


class _Pieces:
    """Converter of an engine's choices to choices of a text completion, plain or streamed."""

    def __init__(self, call: ChatCall) -> None:
        self._request = call.request
        self._offsets: dict[int, int] = {}
        """Number of characters of each choice that were converted so far."""

    def choice(self, choice: EngineChoice, text: str, prompt_ids: Sequence[int] | None) -> dict[str, object]:
        """Convert a choice. `prompt_ids` are returned to a client that requested token ids."""
        fields: dict[str, object] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice) if self._request.logprobs and choice.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._request.return_token_ids:
            fields["token_ids"] = choice.token_ids
            fields["prompt_token_ids"] = prompt_ids
        return fields

    def _logprobs(self, choice: EngineChoice) -> dict[str, object]:
        """Return the logprobs as parallel lists of tokens, logprobs, alternatives and text offsets."""
        entries: Sequence[TokenLogprob] = (choice.logprobs.content if choice.logprobs else None) or ()
        offsets, offset = [], self._offsets.get(choice.index, 0)
        for entry in entries:
            offsets.append(offset)
            offset += len(entry.get("token", ""))
        self._offsets[choice.index] = offset
        tops = [{top["token"]: top["logprob"] for top in entry.get("top_logprobs", ())} for entry in entries]
        return {
            "tokens": [entry.get("token", "") for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops if self._request.top_logprobs else None,
            "text_offset": offsets,
        }


def _head(call: ChatCall, version: str) -> dict[str, JsonValue]:
    created_s = int(call.started_at.timestamp())
    return {"id": call.response_id, "object": "text_completion", "created": created_s, "model": version}
