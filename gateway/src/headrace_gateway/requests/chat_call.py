"""One parsed chat call: caller, model, messages, and the body of the request to a replica."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import JsonValue
from pydantic_core import to_json

from headrace_gateway.requests.chat_messages import message_json
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.identity import CallIdentity, opening
from headrace_schemas import Message, Sampling, SubAgent
from headrace_schemas.events.turn import ResponseRecord
from headrace_schemas.http.answer_form import constraint_fields
from headrace_schemas.http.replica_api import (
    BACKGROUND,
    HISTORY_FIELD,
    PROMPT_FIELD,
    PURPOSE_HEADER,
    RESUME_FIELD,
    SESSION_HEADER,
    History,
    Resume,
)

CHAMPION = "champion"


@dataclass(frozen=True, slots=True)
class Target:
    """Model, and alias or version, that a request's field `model` refers to."""

    model: str
    alias: str = CHAMPION
    version: str | None = None
    is_substitute: bool = False
    """Whether the requested name is unknown, and this model answers in place of it."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A parsed call with all data that do not depend on the replica."""

    request: ChatRequest
    messages: tuple[Message, ...]
    sampling: Sampling
    identity: CallIdentity
    target: Target
    response_id: str
    digest: str
    """Digest of model, messages, tools and sampling parameters. It is equal if an SDK retries a request."""
    retry: int
    started_at: datetime
    core: bytes
    """JSON object of the request to a replica, without the fields `model` and `stream`."""
    cache_salt: str = ""
    """Value of vLLM's field `cache_salt`, which separates the prefix caches of tenants."""
    side_call: str | None = None
    """Kind of a call that is not part of the client's task, for example `title` (see
    `headrace_gateway.requests.identity`); None for other calls."""
    sub_agent: SubAgent | None = None
    response: ResponseRecord | None = None
    """Id, predecessor and conversation of the call in the Responses API; None in the other APIs."""
    repeats: str | None = None
    """Id of the turn with the same request whose answer may not have reached the client, or None."""
    message_digests: bytes = b""
    """Digests of the conversation up to each message (`headrace_gateway.capture.captured_turns`)."""
    ignored: tuple[str, ...] = ()
    """Names of fields of the request that were accepted without an effect."""

    @property
    def opens_a_run(self) -> bool:
        """Whether the call begins a run in an implicit session, that is, one that the client did not name.

        Earlier runs with the same opening messages have the same session key. The call does not have to use the version
        that answered them.
        """
        return self.identity.source == "implicit" and len(opening(self.messages)) == len(self.messages)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request to a replica: the session key, and whether the call is background work. The replica
        uses them to share its capacity fairly."""
        background = {PURPOSE_HEADER: BACKGROUND} if self.is_background else {}
        return {SESSION_HEADER: self.identity.session_key, **background}

    @property
    def is_background(self) -> bool:
        """Whether the call is an evaluation, which gets only capacity that calls of users do not need."""
        return self.identity.purpose == "eval"

    def without_max_tokens(self) -> ChatCall:
        """Return the call without `max_tokens` in the replica's request, and with it among the `ignored` fields.

        The field is removed from the text of `core`, at the first place where it occurs. A message with the same text
        is no such place, because quotation marks inside JSON strings are escaped.
        """
        field = b',"max_tokens":%d' % (self.sampling.max_tokens or 0)
        return replace(self, core=self.core.replace(field, b"", 1), ignored=(*self.ignored, "max_tokens"))

    def body(self, version: str, resume: Resume | None = None, history: History | None = None) -> bytes:
        """Return the body of the request to a replica that serves `version`."""
        parts = [b'{"model":', to_json(version), b","]
        if self.cache_salt:
            parts += [b'"cache_salt":', to_json(self.cache_salt), b","]
        if self.request.stream:
            parts.append(b'"stream":true,"stream_options":{"include_usage":true},')
        if resume is not None:
            parts += [b'"', RESUME_FIELD.encode(), b'":', resume.model_dump_json().encode(), b","]
        if history is not None:
            parts += [b'"', HISTORY_FIELD.encode(), b'":', history.model_dump_json().encode(), b","]
        return b"".join([*parts, self.core[1:]])


_SENT_IF_SET = ("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop")
"""Sampling parameters that are sent to a replica only if their value has an effect."""


def canonical_request(
    request: ChatRequest, messages: tuple[Message, ...], sampling: Sampling, encoded: Sequence[bytes] | None = None
) -> bytes:
    """Return canonical JSON of the fields that determine the sampled tokens, without the model.

    Args:
        request: The request.
        messages: Its messages.
        sampling: Its sampling parameters.
        encoded: The messages as JSON; None if they must be encoded here.
    """
    encoded = encoded if encoded is not None else [message_json(message) for message in messages]
    texts = b",".join(map(_for_template, messages, encoded))
    fields: dict[str, JsonValue] = {
        "n": request.choices,
        **sampling.model_dump(mode="json", exclude_none=True, exclude={*_SENT_IF_SET, "grammar"}),
    }
    if request.tools:
        fields["tools"] = [tool.model_dump(mode="json", exclude_none=True) for tool in request.tools]
        fields["tool_choice"] = "none" if request.tool_choice == "none" else "auto"
    if sampling.grammar is not None:
        fields |= constraint_fields(sampling.grammar)
        if request.parallel_tool_calls is False:
            fields["parallel_tool_calls"] = False
    for name in _SENT_IF_SET:
        value = getattr(sampling, name)
        if value:
            fields[name] = {str(token): bias for token, bias in value.items()} if name == "logit_bias" else value
    if request.raw_prompt is not None:
        fields[PROMPT_FIELD] = request.raw_prompt.model_dump(mode="json", exclude_none=True)
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = request.chat_template_kwargs
    return b"".join([b'{"messages":[', texts, b"],", to_json(fields)[1:]])


def core_of(canonical_json: bytes, request: ChatRequest) -> bytes:
    """Return `canonical_json` with the fields that the gateway adds to each request to a replica: exact token ids and
    logprobs."""
    top = b',"top_logprobs":%d' % request.top_logprobs if request.top_logprobs else b""
    return canonical_json[:-1] + b',"return_token_ids":true,"logprobs":true' + top + b"}"


def digest_of(model: str, canonical_json: bytes) -> str:
    return hashlib.sha256(model.encode() + b"\0" + canonical_json).hexdigest()


def _for_template(message: Message, encoded: bytes) -> bytes:
    """Return the JSON of a message whose content is one text, as chat templates expect it."""
    if isinstance(message.content, str):
        return encoded
    fields: dict[str, JsonValue] = message.model_dump(mode="json", exclude_none=True)
    fields["content"] = message.text
    return to_json(fields)
