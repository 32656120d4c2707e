"""What a URL may carry before the API's own path, for clients that can set nothing but a base URL.

`/t/{key}` is an API key and `/sessions/{id}` names the session: `http://host:8000/t/KEY/sessions/run-7/v1/...`. Doubled
slashes are one: AgentScope's client appends `/feedback` to an endpoint that may end with a slash.
"""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "headrace.key"
SESSION = "headrace.session"
_NAMES = {"t": KEY, "sessions": SESSION}


class Prefixes:
    """Peels the prefixes off the path, into the ASGI scope under `KEY` and `SESSION`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if "//" in path or path.startswith(("/t/", "/sessions/")):
                scope = _peeled(scope)
        await self._app(scope, receive, send)


def _peeled(scope: Scope) -> Scope:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    parts = [unquote(part) for part in raw.decode("ascii", "replace").split("/") if part]
    found: dict[str, str] = {}
    while len(parts) >= 2 and (name := _NAMES.get(parts[0])) and name not in found:
        found[name] = parts[1]
        parts = parts[2:]
    return {**scope, **found, "path": "/" + "/".join(parts)}
