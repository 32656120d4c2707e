"""Security headers of every response: no inline script or style, no resource of another origin, no frame, no cache.

The referrer policy is `same-origin`, because with `no-referrer` browsers send `Origin: null` with forms, which the web
guard refuses.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_DEFAULTS = {b"cache-control": b"no-store", b"referrer-policy": b"same-origin"}


class SecurityHeaders:
    """Middleware that adds the headers. Responses may have another cache rule or referrer policy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own_headers = list(message.get("headers", ()))
                names = {name for name, _ in own_headers}
                defaults = [(name, value) for name, value in _DEFAULTS.items() if name not in names]
                message = {**message, "headers": [*own_headers, *_HEADERS, *defaults]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
