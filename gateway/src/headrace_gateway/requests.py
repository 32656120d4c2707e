"""Reading requests: headers as a mapping, a body within its bound, and validation errors as clear refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from headrace_gateway.body_encoding import SUPPORTED, decoded
from headrace_gateway.refusals import ApiError
from headrace_gateway.request_context import RequestContext
from headrace_runtime.kafka.wire import more_values_than
from headrace_runtime.process.worker_threads import run_off_loop
from headrace_schemas.values.text import closest, printable

M = TypeVar("M", bound=BaseModel)
_DEPTH_SHOWN = 8
"""Parts of the path to a field that a refusal names."""


_NAMING = (b"authorization", b"x-api-key", b"x-session-id", b"x-task-id", b"x-run-id", b"x-user-id", b"x-shadow-of")
"""Headers that name a caller or the subject of a request."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers by their names in lower case; of one that is repeated the last counts.

    Raises:
        ApiError: 400, a header that names something is repeated with another value.
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
    """Return the whole body, decompressed.

    Raises:
        ApiError: 413 as soon as the body is known to be too large, compressed or not, 415 for an unknown compression.
    """
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower().removeprefix("x-")
    if encoding in ("identity", ""):
        return await _received(headers, receive, bytes_max)
    if encoding not in SUPPORTED:
        message = f"content-encoding {printable(encoding)!r}: not supported; use {', '.join(SUPPORTED)}, or none"
        raise ApiError(415, "unsupported_encoding", message)
    body = await _received(headers, receive, bytes_max)
    return await run_off_loop(bytes_max, lambda: decoded(body, encoding, bytes_max))


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
    """Raises `ApiError` 413 when `body` holds more JSON values, or objects and lists, than are parsed here."""
    if more_values_than(body, values_max, containers_max):
        containers = (
            f", or more than {containers_max} objects and lists" if (containers_max or values_max) < values_max else ""
        )
        message = f"the request body holds more than {values_max} JSON values{containers}; {remedy}"
        raise ApiError(413, "too_many_values", message)


def parse(model: type[M], body: bytes, *, status: int = 400, context: RequestContext | None = None) -> M:
    """Return the body as a `model`.

    Raises:
        ApiError: `status` (400 for a body that is no JSON); it names the field at fault, never its value.
    """
    try:
        return model.model_validate_json(body, context=context.for_validation() if context else None)
    except ValidationError as error:
        raise refusal_of(error, model, status) from None


def refusal_of(error: ValidationError, model: type[BaseModel], status: int = 400) -> ApiError:
    """The first problem of `error` as a refusal."""
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
    """The refusal of an unknown field, with a similar known name."""
    similar = closest(name, candidates)
    hint = f"; did you mean {similar!r}?" if similar else ""
    return ApiError(status, "unknown_field", f"unknown field '{printable(name)}'{hint}", printable(name))


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the request body is larger than {bytes_max} bytes")
