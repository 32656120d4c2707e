"""Client of an OpenAI-compatible endpoint, and the errors that its calls raise."""

from __future__ import annotations

import asyncio
import json
import math
from datetime import UTC
from email.utils import parsedate_to_datetime

import httpx2
from pydantic import BaseModel, Field, ValidationError

from headrace_judge.metrics import CALL_SECONDS, CALLS, TOKENS
from headrace_judge.run_transcript import ChatMessage
from headrace_judge.settings import EndpointSettings
from headrace_runtime.errors import HeadraceError, SettingError, Unavailable
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.errors import Redactor
from headrace_schemas.values.ids import key_of_response, uuid7
from headrace_schemas.values.text import printable, storable

RESPONSE_BYTES_MAX = 1_048_576
"""Largest response. Longer ones are refused."""
RETRY_AFTER_MAX_S = 3600.0
"""Longest wait that the endpoint may request with `Retry-After`, so that it cannot stop the judge for days."""

OWN_SESSIONS = "headrace-judge-"
"""Prefix of the sessions of the judge's own calls if the endpoint is a gateway. Each call is a session."""
_QUOTED_BYTES_MAX = 1024
_USAGE_TOKENS_MAX = 2**24
"""Largest count of tokens that is believed. A larger one in one answer would spend the budget of all tenants."""
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
"""Encodings of answers that are decoded. They grow by at most a factor of 1,032, others by more than 10,000."""
_CONTENT_REFUSED = frozenset({400, 413, 422})


class EndpointUnavailable(Unavailable):
    """Error of a call to an endpoint that is down, overloaded or misconfigured. A retry may succeed.

    `wait_s` is the waiting time that the endpoint requested. `billed` is whether it may have billed the call.
    """

    result = "away"

    def __init__(self, message: str, *, wait_s: float | None = None, billed: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.billed = billed


class CallTimedOut(HeadraceError):
    """Error of a call whose answer was not complete within `timeout_s`. The endpoint may have billed it."""

    result = "timed_out"


class CallRefused(HeadraceError):
    """Error of a call that the endpoint refuses. A retry cannot succeed."""

    result = "refused"


class Completion(BaseModel):
    """Answer of the endpoint to one call. `tokens` is None if the endpoint did not report how many it used."""

    text: str
    refused: bool = False
    """Whether the model refused to answer, or the provider's content filter applied."""
    tokens: int | None = None


class _Part(BaseModel):
    text: str = ""


class _Message(BaseModel):
    content: str | list[_Part] | None = None
    """Text or list of parts. Some endpoints return parts that include reasoning; only texts are read."""
    refusal: object = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class _Choice(BaseModel):
    message: _Message
    finish_reason: object = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=0, lt=_USAGE_TOKENS_MAX)
    completion_tokens: int = Field(default=0, ge=0, lt=_USAGE_TOKENS_MAX)


class _Response(BaseModel):
    id: object = None
    choices: list[_Choice] = Field(min_length=1)
    usage: object = None

    @property
    def usage_if_readable(self) -> _Usage | None:
        """Tokens that the call used, or None if the endpoint reported none or in an invalid form.

        An invalid report does not invalidate the verdict.
        """
        try:
            return _Usage.model_validate(self.usage)
        except ValidationError:
            return None


class Endpoint:
    """HTTP client of the judge's endpoint. The caller must close it.

    Args:
        key: bearer token; empty for none.
    """

    def __init__(self, settings: EndpointSettings, key: str) -> None:
        self._settings = settings
        self._redact = Redactor([key])
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=settings.concurrency)
        try:
            self._client = httpx2.AsyncClient(
                headers=headers, limits=limits, timeout=None, trust_env=not settings.is_gateway
            )
        except (ImportError, ValueError) as error:  # a SOCKS proxy without its package, or an invalid address
            message = (
                f"the proxy of the environment cannot be used ({printable(str(error))}); unset ALL_PROXY and similar "
                "variables"
            )
            raise SettingError("judge.endpoint.base_url", settings.base_url, message) from None

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        await self._client.aclose()

    def body(self, messages: list[ChatMessage]) -> dict[str, object]:
        """Return the body of a request with these messages. Its digest is the key of the cached verdict."""
        settings = self._settings
        limits = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        body: dict[str, object] = {"model": settings.model, "messages": messages}
        body |= {name: value for name, value in limits.items() if name not in settings.omit}
        return body | settings.extra

    async def complete(self, messages: list[ChatMessage]) -> Completion:
        """Call the endpoint, and return its answer to `messages`.

        Raises:
            EndpointUnavailable, CallTimedOut, CallRefused: the call failed. Messages quote the endpoint, shortened and
                redacted.
        """
        try:
            with CALL_SECONDS.time():
                completion = await self._call(messages)
        except (EndpointUnavailable, CallTimedOut, CallRefused) as error:
            CALLS.labels(error.result).inc()
            raise
        CALLS.labels("answered").inc()
        return completion

    async def _call(self, messages: list[ChatMessage]) -> Completion:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                status, headers, content = await self._post(messages)
        except TimeoutError:
            raise CallTimedOut(f"no verdict within {self._settings.timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            billed = not isinstance(error, httpx2.ConnectError)
            raise EndpointUnavailable(
                f"the endpoint cannot be reached: {type(error).__name__}", billed=billed
            ) from None
        return self._read(status, headers, content)

    async def _post(self, messages: list[ChatMessage]) -> tuple[int, httpx2.Headers, bytes]:
        url = f"{self._settings.base_url}/chat/completions"
        headers = {"Accept-Encoding": "gzip, deflate"}
        if self._settings.is_gateway:
            headers |= {"X-Headrace-Purpose": "eval", "X-Session-Id": f"{OWN_SESSIONS}{uuid7()}"}
        content = bytearray()
        async with self._client.stream("POST", url, json=self.body(messages), headers=headers) as response:
            encoding = response.headers.get("content-encoding", "").strip().lower()
            if encoding not in _ENCODINGS:
                problem = f"the endpoint encodes its answer as {printable(encoding, 64)!r}, which was not requested"
                raise EndpointUnavailable(problem, billed=True)
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > RESPONSE_BYTES_MAX:
                    raise CallRefused(f"the response is longer than {RESPONSE_BYTES_MAX} bytes")
        return response.status_code, response.headers, bytes(content)

    def _read(self, status: int, headers: httpx2.Headers, content: bytes) -> Completion:
        if status in _CONTENT_REFUSED:
            raise CallRefused(f"the endpoint answered {status}{self._quotation(content)}")
        if status != 200:
            wait_s = retry_after_s(headers.get("retry-after"), RETRY_AFTER_MAX_S)
            raise EndpointUnavailable(f"the endpoint answered {status}{self._quotation(content)}", wait_s=wait_s)
        try:
            response = _Response.model_validate_json(content)
        except ValidationError as error:
            (problem, *_) = error.errors(include_input=False, include_url=False)
            field = ".".join(map(str, problem["loc"])) or "the body"
            text = f"the endpoint answered 200 without a chat completion: {field}: {problem['msg']}"
            raise EndpointUnavailable(f"{text}{self._quotation(content)}", billed=True) from None
        from_gateway = isinstance(response.id, str) and key_of_response(response.id)
        if not self._settings.is_gateway and from_gateway:  # no SettingError, because no answer may end the judge
            text = f"judge.endpoint.is_gateway = false: {self._settings.base_url} is a Headrace gateway; set it to true"
            raise EndpointUnavailable(text, billed=True)
        return _completion(response)

    def _quotation(self, content: bytes) -> str:
        """Return a quotation of the error message in the endpoint's answer, or else of the answer's beginning.

        It does not contain the endpoint's key.
        """
        try:
            body = json.loads(content)
            message = body["error"]["message"] if isinstance(body["error"], dict) else body["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            message = None
        text = message if isinstance(message, str) else content.decode(errors="replace")
        return f": {printable(self._redact(text)[:_QUOTED_BYTES_MAX].strip())!r}" if text.strip() else ""


def _completion(response: _Response) -> Completion:
    choice, usage = response.choices[0], response.usage_if_readable
    if usage:
        TOKENS.labels("prompt").inc(usage.prompt_tokens)
        TOKENS.labels("completion").inc(usage.completion_tokens)
    return Completion(
        text=storable(choice.message.text),
        refused=bool(choice.message.refusal) or choice.finish_reason == "content_filter",
        tokens=usage.prompt_tokens + usage.completion_tokens if usage else None,
    )


def retry_after_s(header: str | None, limit_s: float) -> float | None:
    """Return the waiting time in a `Retry-After` header in seconds, at most `limit_s`, or None without a valid header.

    The header has a number of seconds or a date (RFC 9110 section 10.2.3).
    """
    if not header:
        return None
    try:
        wait_s = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return None
        wait_s = ((when if when.tzinfo else when.replace(tzinfo=UTC)) - utcnow()).total_seconds()
    return None if math.isnan(wait_s) else min(max(wait_s, 0.0), limit_s)
