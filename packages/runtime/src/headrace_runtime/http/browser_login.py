"""Middleware of HTTP servers without a login page that lets a browser log in with the token of the stack.

A browser cannot send a bearer token, but it asks for a password when a server requests HTTP Basic authentication
(RFC 7617), and takes it from a URL such as `http://headrace:TOKEN@127.0.0.1:8003/v1/models`. Unlike a token in the
query, that password is in no request line, no `Referer` and no redirect, and unlike a cookie the browser sends it to
this port alone. The user name has no meaning. Only requests without an effect may log in this way.
"""

from __future__ import annotations

import base64
import binascii

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READING = frozenset(("GET", "HEAD"))
_CHALLENGE = (b"www-authenticate", b'Basic realm="Headrace: the password is the token", charset="UTF-8"')


class BrowserLogin:
    """Middleware that passes the password of Basic authentication on as a bearer token, and requests one for pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _READING:
            await self._app(scope, receive, send)
            return
        headers = [(name, _as_bearer(value) if name == b"authorization" else value) for name, value in scope["headers"]]
        is_page = any(name == b"accept" and b"text/html" in value for name, value in headers)

        async def send_with_challenge(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                message = {**message, "headers": [*message.get("headers", ()), _CHALLENGE]}
            await send(message)

        await self._app({**scope, "headers": headers}, receive, send_with_challenge if is_page else send)


def _as_bearer(authorization: bytes) -> bytes:
    """Return a bearer token for Basic credentials, and any other value unchanged."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        password = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return authorization
    return b"Bearer " + password
