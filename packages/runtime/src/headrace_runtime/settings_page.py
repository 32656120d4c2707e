"""Page `GET /settings`: the settings of a service without secrets, for programs that compare them with their own."""

from __future__ import annotations

from pydantic import BaseModel, JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime import web
from headrace_runtime.settings import Common
from headrace_schemas.values.errors import HIDDEN, is_secret, redacted


def settings_route(service: str, settings: BaseModel, common: Common) -> Route:
    """Return the route of the page, which requires the internal key if one is set."""

    async def page(request: Request) -> Response:
        web.require_internal_key(request, common)
        return JSONResponse({"service": service, "settings": public_settings(settings)})

    return Route("/settings", page)


def public_settings(settings: BaseModel) -> dict[str, JsonValue]:
    """Return all settings by name, without values that are typed or named as secrets and without passwords in URLs."""
    values: dict[str, JsonValue] = settings.model_dump(mode="json")
    return {name: _without_secrets(name, value) for name, value in values.items()}


def _without_secrets(name: str, value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {inner: _without_secrets(inner, item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else redacted(value)
