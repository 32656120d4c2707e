"""Answers that refuse, in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace_runtime.errors import Refused

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Refused):
    """A refusal with its OpenAI error type and, where trying again helps, after how many seconds."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, code, message, param)
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}


def overloaded(message: str, retry_after_s: float = 5.0) -> ApiError:
    return ApiError(503, "overloaded", message, retry_after_s=retry_after_s)


async def refused(_request: Request, error: Exception) -> Response:
    """Starlette's handler for everything that refuses on purpose, its own unknown paths and methods included."""
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "refused")
        error = ApiError(error.status_code, code, f"{error.detail}; the API's paths are in the gateway's README")
    elif isinstance(error, Refused) and not isinstance(error, ApiError):
        error = ApiError(error.status, error.code, str(error), error.param)
    assert isinstance(error, ApiError)
    return Response(error.body, error.status, error.headers, media_type="application/json")


async def crashed(_request: Request, _error: Exception) -> Response:
    """The answer to a request that met a bug of ours; the server logs the traceback."""
    error = ApiError(500, "internal_error", "the gateway failed; its log says why")
    return Response(error.body, error.status, media_type="application/json")
