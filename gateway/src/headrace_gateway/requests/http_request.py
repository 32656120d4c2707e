"""Parsing of HTTP requests: forms of the URL, headers, compressed bodies and their limits, and validation errors.

`/t/{key}` is an API key and `/sessions/{id}` names the session: `http://host:8000/t/KEY/sessions/run-7/v1/...`. Doubled
slashes count as one, because AgentScope's client appends `/feedback` to an endpoint that may end with a slash. A
trailing slash has no meaning, and `/v1` may be missing or doubled, because clients differ in whether a base URL ends
with it. The server's own decoding of percent escapes is not used, because it replaces bytes that are not UTF-8 (see
`headrace_schemas.values.ids`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import cramjam
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.request_context import RequestContext
from headrace_runtime.kafka.wire import exceeds_value_limits
from headrace_runtime.process.event_loop import run_off_loop
from headrace_schemas.values.ids import decode_segment
from headrace_schemas.values.text import closest, printable

SUPPORTED = ("gzip", "deflate", "zstd")
_GZIP_WINDOW = 31
"""Value of zlib's `wbits` for a gzip stream with the largest window."""
_MEMBERS_MAX = 100
"""Maximum number of members of a gzip body. Decompressing each copies the rest of the body."""
M = TypeVar("M", bound=BaseModel)
_DEPTH_SHOWN = 8
"""Maximum number of parts of a field's path in a message."""

_NAMING = (b"authorization", b"x-api-key", b"x-session-id", b"x-task-id", b"x-run-id", b"x-user-id", b"x-shadow-of")
"""Headers that identify a caller or the subject of a request."""
KEY = "headrace.key"
SESSION = "headrace.session"
_WITHOUT_VERSION = (b"/chat/completions", b"/completions", b"/responses", b"/conversations", b"/messages", b"/models")
"""Paths that are also served without `/v1`."""
_NAMES = {"t": KEY, "sessions": SESSION}


class _TooLarge(Exception):
    """Raised if the decompressed body is larger than its limit."""


def decompress(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Return the decompressed body. The function may run in any thread.

    Raises:
        ApiError: 400 for a damaged body or one of too many gzip members, 413 for one of more than `bytes_max` bytes.
    """
    try:
        if encoding == "zstd":
            return _zstd(body, bytes_max)
        return _zlib(body, _GZIP_WINDOW if encoding == "gzip" else zlib.MAX_WBITS, bytes_max)
    except (zlib.error, cramjam.DecompressionError):
        message = f"the request body is not valid {encoding}; send it whole, or without content-encoding"
        raise ApiError(400, "invalid_encoding", message) from None
    except _TooLarge:
        message = f"the request body is larger than {bytes_max} bytes after decompression"
        raise ApiError(413, "body_too_large", message) from None


def _zlib(body: bytes, window: int, bytes_max: int) -> bytes:
    """Decompress all members of a gzip body, or one deflate stream."""
    parts: list[bytes] = []
    remaining = bytes_max
    while body:
        if len(parts) == _MEMBERS_MAX:
            message = f"the request body has more than {_MEMBERS_MAX} gzip members; compress it as one"
            raise ApiError(400, "invalid_encoding", message)
        stream = zlib.decompressobj(window)
        parts.append(stream.decompress(body, remaining + 1))
        remaining -= len(parts[-1])
        if remaining < 0:
            raise _TooLarge
        if not stream.eof:
            raise zlib.error("the stream ends too early")
        body = stream.unused_data
    return b"".join(parts)


def _zstd(body: bytes, bytes_max: int) -> bytes:
    buffer = bytearray(bytes_max + 1)
    try:
        length = cramjam.zstd.decompress_into(body, buffer)
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error):
            raise _TooLarge from None
        raise
    if length > bytes_max:
        raise _TooLarge
    return bytes(memoryview(buffer)[:length])


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers by their lower-case names. If a header is repeated, the last value counts.

    Raises:
        ApiError: 400, a header that identifies a caller or a subject is repeated with another value.
    """
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    headers = dict(pairs)
    if len(headers) < len(pairs):
        for name, value in pairs:
            if name in _NAMING and value != headers[name]:
                header = name.decode("ascii").title()
                raise ApiError(400, "repeated_header", f"{header}: two different values; send one", header)
    return headers


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, bytes_max: int) -> bytes:
    """Read the complete body, and return it decompressed.

    Raises:
        ApiError: 413 as soon as the compressed or decompressed body exceeds its limit, 415 for an unknown compression.
    """
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower().removeprefix("x-")
    if encoding in ("identity", ""):
        return await _received(headers, receive, bytes_max)
    if encoding not in SUPPORTED:
        message = f"content-encoding {printable(encoding)!r}: not supported; use {', '.join(SUPPORTED)}, or none"
        raise ApiError(415, "unsupported_encoding", message)
    body = await _received(headers, receive, bytes_max)
    return await run_off_loop(bytes_max, lambda: decompress(body, encoding, bytes_max))


async def _received(headers: Mapping[bytes, bytes], receive: Receive, bytes_max: int) -> bytes:
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > bytes_max:
        raise _too_large(bytes_max)
    chunks: list[bytes] = []
    remaining = bytes_max
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "incomplete_body", "the connection ended inside the request body")
        chunks.append(message.get("body", b""))
        remaining -= len(chunks[-1])
        if remaining < 0:
            raise _too_large(bytes_max)
        if not message.get("more_body", False):
            return b"".join(chunks)


def check_values(
    body: bytes, values_max: int, remedy: str = "send less at once", *, containers_max: int | None = None
) -> None:
    """Check that `body` has at most `values_max` JSON values, and at most `containers_max` objects and lists. Raises
    `ApiError` 413."""
    if exceeds_value_limits(body, values_max, containers_max):
        containers = (
            f", or more than {containers_max} objects and lists" if (containers_max or values_max) < values_max else ""
        )
        message = f"the request body holds more than {values_max} JSON values{containers}; {remedy}"
        raise ApiError(413, "too_many_values", message)


def parse(model: type[M], body: bytes, *, status: int = 400, context: RequestContext | None = None) -> M:
    """Parse a JSON body to a `model`.

    Raises:
        ApiError: `status`, or 400 for a body that is not JSON. The message names the field, but never its value.
    """
    try:
        return model.model_validate_json(body, context=context.for_validation() if context else None)
    except ValidationError as error:
        raise refusal_of(error, model, status) from None


def refusal_of(error: ValidationError, model: type[BaseModel], status: int = 400) -> ApiError:
    """Convert the first problem of `error` to a refusal."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = printable(".".join(printable(str(part)) for part in first["loc"][:_DEPTH_SHOWN]))
    if first["type"] == "json_invalid":
        return ApiError(400, "invalid_json", f"the body is not valid JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return unknown_field(where, model.model_fields if len(first["loc"]) == 1 else (), status)
    if first["type"] == "feedback_rule":  # several fields together are at fault, and the rule names one
        return ApiError(status, "invalid_value", first["msg"], str(first["ctx"]["field"]))
    if first["type"] == "model_type" and not where:
        return ApiError(status, "invalid_value", "the body must be a JSON object")
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(status, code, f"{where}: {message}" if where else message, where or None)


def unknown_field(name: str, candidates: Iterable[str], status: int = 400) -> ApiError:
    """Return the refusal of an unknown request field. The message suggests a similar one of `candidates`."""
    similar = closest(name, candidates)
    hint = f"; did you mean {similar!r}?" if similar else ""
    return ApiError(status, "unknown_field", f"unknown field '{printable(name)}'{hint}", printable(name))


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the request body is larger than {bytes_max} bytes")


class PathPrefixes:
    """Middleware that removes the prefixes `/t/{key}` and `/sessions/{id}` from the path, and stores their values in
    the ASGI scope under `KEY` and `SESSION`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            is_odd = b"//" in raw or b"%" in raw or (raw.endswith(b"/") and raw != b"/")
            if is_odd or raw.startswith((b"/t/", b"/sessions/", b"/v1/v1/", *_WITHOUT_VERSION)):
                scope = _peeled(scope, raw)
        await self._app(scope, receive, send)


def _peeled(scope: Scope, raw: bytes) -> Scope:
    parts = [decode_segment(part) for part in raw.split(b"/") if part]
    prefixes: dict[str, str] = {}
    while len(parts) >= 2 and (name := _NAMES.get(parts[0])) and name not in prefixes:
        prefixes[name] = parts[1]
        parts = parts[2:]
    if parts[:2] == ["v1", "v1"]:
        parts = parts[1:]
    path = "/" + "/".join(parts)
    if any(f"{path}/".startswith(f"{bare_path.decode()}/") for bare_path in _WITHOUT_VERSION):
        path = f"/v1{path}"
    return {**scope, **prefixes, "path": path}
