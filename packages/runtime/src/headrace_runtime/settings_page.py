"""`GET /settings`: what a service is set to, without its secrets. Programs that attach to it compare what they ask
for."""

from __future__ import annotations

from pydantic import BaseModel, JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime import web
from headrace_runtime.settings import Common
from headrace_schemas.redaction import HIDDEN, is_secret, redacted


def settings_route(service: str, settings: BaseModel, common: Common) -> Route:
    """The page. It needs the internal key where one is set."""

    async def page(request: Request) -> Response:
        web.require_internal_key(request, common)
        return JSONResponse({"service": service, "settings": told(settings)})

    return Route("/settings", page)


def told(settings: BaseModel) -> dict[str, JsonValue]:
    """Every setting by name; what is typed or named as a secret is hidden, and so are passwords in URLs."""
    shown: dict[str, JsonValue] = settings.model_dump(mode="json")
    return {name: _without_secrets(name, value) for name, value in shown.items()}


def _without_secrets(name: str, value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {inner: _without_secrets(inner, item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else redacted(value)
