"""Errors of refused requests in the formats of OpenAI's API (`{"error": {"message", "type", "param", "code"}}`) and
of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace_runtime.errors import Refused
from headrace_schemas.values import ids

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
REQUEST_ID_HEADER = "request-id"
_OVERLOADED_STATUS = 529
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Refused):
    """Refusal of a request with its HTTP status, its OpenAI error type, and the seconds after which a retry may
    succeed."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, code, message, param)
        self.retry_after_s = retry_after_s

    def with_client_names(self, names: Mapping[str, str]) -> ApiError:
        """Return this error with the field's name in the client's API, if the gateway translated the request from
        another API.

        Args:
            names: The client's name of each field of the translation. Other fields keep their name; positions inside of
                a renamed field are left out, because they are those of the translation.
        """
        field = names.get((self.param or "").partition(".")[0])
        if field is None:
            return self
        reason = str(self).partition(": ")[2]
        return ApiError(self.status, self.code, f"{field}: {reason or self}", field)

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return _encoded({"error": error})

    @property
    def anthropic_status(self) -> int:
        """Return the status that Anthropic's API uses: 529 if the server has no capacity."""
        return _OVERLOADED_STATUS if self.status == 503 else self.status

    def anthropic_body(self, request_id: str) -> bytes:
        """Return the body of the refusal, or the data of an `error` event, in the form of Anthropic's API."""
        status = self.anthropic_status
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": str(self)}
        return _encoded({"type": "error", "error": error, "request_id": request_id})

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}


def _encoded(document: dict[str, object]) -> bytes:
    """Return the document as JSON. Lone surrogates, which an engine's error may contain, become question marks."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")


def overloaded_error(message: str, retry_after_s: float = 5.0) -> ApiError:
    return ApiError(503, "overloaded", message, retry_after_s=retry_after_s)


def is_anthropic(request: Request) -> bool:
    """Return whether the request uses Anthropic's API, by its path or by the header that all its clients send."""
    path: str = request.scope["path"]
    return path == "/v1/messages" or path.startswith("/v1/messages/") or "anthropic-version" in request.headers


async def refusal_response(request: Request, error: Exception) -> Response:
    """Return the response to a request that is refused on purpose, including unknown paths and methods."""
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "refused")
        error = ApiError(error.status_code, code, f"{error.detail}; the API's paths are in the gateway's README")
    elif isinstance(error, Refused) and not isinstance(error, ApiError):
        error = ApiError(error.status, error.code, str(error), error.param)
    assert isinstance(error, ApiError)
    return _response(request, error)


async def internal_error_response(request: Request, _error: Exception) -> Response:
    """Return the response to a request that failed by a bug of the gateway. The server logs the traceback."""
    return _response(request, ApiError(500, "internal_error", "the gateway failed; its log says why"))


def _response(request: Request, error: ApiError) -> Response:
    """Return the refusal in the form of the API that the request uses."""
    if is_anthropic(request):
        request_id = f"req_{ids.uuid7().hex}"
        headers = {**error.headers, REQUEST_ID_HEADER: request_id}
        body = error.anthropic_body(request_id)
        return Response(body, error.anthropic_status, headers, media_type="application/json")
    return Response(error.body, error.status, error.headers, media_type="application/json")
