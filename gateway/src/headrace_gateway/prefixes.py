"""What a URL may carry before the API's own path, for clients that can set nothing but a base URL.

`/t/{key}` is an API key and `/sessions/{id}` names the session: `http://host:8000/t/KEY/sessions/run-7/v1/...`. Doubled
slashes are one: AgentScope's client appends `/feedback` to an endpoint that may end with a slash. The server's own
decoding of percent forms is not used, because it replaces what is no UTF-8 (see `headrace_schemas.names`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_schemas.names import decode_segment

KEY = "headrace.key"
SESSION = "headrace.session"
_NAMES = {"t": KEY, "sessions": SESSION}


class Prefixes:
    """Peels the prefixes off the path, into the ASGI scope under `KEY` and `SESSION`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            if b"//" in raw or b"%" in raw or raw.startswith((b"/t/", b"/sessions/")):
                scope = _peeled(scope, raw)
        await self._app(scope, receive, send)


def _peeled(scope: Scope, raw: bytes) -> Scope:
    parts = [decode_segment(part) for part in raw.split(b"/") if part]
    found: dict[str, str] = {}
    while len(parts) >= 2 and (name := _NAMES.get(parts[0])) and name not in found:
        found[name] = parts[1]
        parts = parts[2:]
    return {**scope, **found, "path": "/" + "/".join(parts)}
