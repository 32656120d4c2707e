"""Forms of a URL besides the API's own paths, for clients that can only set a base URL.

`/t/{key}` is an API key and `/sessions/{id}` names the session: `http://host:8000/t/KEY/sessions/run-7/v1/...`. Doubled
slashes are one: AgentScope's client appends `/feedback` to an endpoint that may end with a slash. A slash at the end
has no meaning, and `/v1` may be missing or doubled: clients differ in whether a base URL ends with it. The server's own
decoding of percent forms is not used, because it replaces bytes that are no UTF-8 (see `headrace_schemas.values.ids`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_schemas.values.ids import decode_segment

KEY = "headrace.key"
SESSION = "headrace.session"
_WITHOUT_VERSION = (b"/chat/completions", b"/completions", b"/responses", b"/conversations", b"/messages", b"/models")
"""Paths that are served without `/v1`, too."""
_NAMES = {"t": KEY, "sessions": SESSION}


class Prefixes:
    """Middleware that moves the prefixes of the path into the ASGI scope, under `KEY` and `SESSION`."""

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
