"""Request bodies, parameters and responses for all pages of the REST interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from headrace_runtime.errors import Refused
from headrace_runtime.http.web import require_internal_key
from headrace_runtime.settings.sections import Common
from headrace_schemas.values.base import Model

_BODY_BYTES_MAX = 65_536
_LIST_MAX = 1000
M = TypeVar("M", bound=Model)
Page = Callable[[Request], Awaitable[Response]]


def require_key(common: Common, page: Page) -> Page:
    """Wrap a page so that it requires the internal key, where one is set, for reads and changes."""

    async def guarded(request: Request) -> Response:
        require_internal_key(request, common)
        return await page(request)

    return guarded


def json_response(value: Model, status: int = 200) -> Response:
    """Return `value` as JSON, without fields that are None."""
    return Response(value.model_dump_json(exclude_none=True), status, media_type="application/json")


async def read_body(request: Request, model: type[M]) -> M:
    """Parse the request's body. Raises `Refused` 400 or 413."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _BODY_BYTES_MAX:
            raise Refused(413, "body_too_large", f"the body is larger than {_BODY_BYTES_MAX} bytes")
    try:
        return model.model_validate_json(content or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, "invalid_request", f"{where or 'body'}: {first['msg']}", where or None) from None


def limit_parameter(parameters: Mapping[str, str]) -> int:
    """Return the query parameter `limit`. Raises `Refused` 400."""
    return number_parameter(parameters, "limit", 100, _LIST_MAX)


def number_parameter(parameters: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return a query parameter from 1 to `most`. Raises `Refused` 400."""
    text = parameters.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or not 1 <= int(text) <= most:
        raise Refused(400, "invalid_request", f"{name} must be a number from 1 to {most}", name)
    return int(text)
