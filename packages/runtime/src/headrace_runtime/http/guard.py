"""Security checks of HTTP connections: against cross-site requests of web pages, for the URLs of replicas, and the
login with a browser.

A web page of any site can send requests to loopback. So the middleware of all HTTP servers refuses unknown names in
`Host` (DNS rebinding), and requests from pages of other origins, whether the page may read the response or not. The
content type of a body must be JSON, which a form, or a page without a CORS preflight, cannot send. A service with pages
of its own also accepts forms, but only with a header that proves that one of these pages sent it. Other clients
(OpenAI's packages, AgentScope, Trinity, HelloAgents) send neither `Origin` nor `Sec-Fetch-Site`, and JSON as
`application/json`.

Each client that may write to the bus may write URLs to the topic `replicas`. So a replica signs its id and its URL with
`security.internal_key`, and services call a URL only if the signature is valid or a setting permits the host. A copied
heartbeat is harmless, because its URL is that of the replica that signed it.

A browser cannot send a bearer token, but it asks for a password if a server requires HTTP Basic authentication (RFC
7617), and it takes the password from a URL such as `http://headrace:TOKEN@127.0.0.1:8003/v1/models`. In contrast to a
token in the query, that password is in no request line, no `Referer` and no redirect. In contrast to a cookie, the
browser sends it to this port only. The user name is ignored. Only requests without an effect may log in this way.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import socket
from collections import OrderedDict
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import SecuritySettings, ServiceSettings, host_fits, is_loopback
from headrace_schemas import Replica

_WITHOUT_EFFECT = frozenset(("GET", "HEAD", "OPTIONS"))
_FORM = re.compile(rb"\s*application/x-www-form-urlencoded\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_JSON = re.compile(rb"\s*application/([a-z0-9.+-]+\+)?json\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]{0,5})?")
_OWN_SITE = frozenset((b"same-origin", b"none"))
_SHOWN_MAX = 100
_PREFLIGHT_AGE_S = b"600"
_READING = frozenset(("GET", "HEAD"))
_CHALLENGE = (b"www-authenticate", b'Basic realm="Headrace: the password is the token", charset="UTF-8"')


class Refusal(Exception):
    """Refusal of a request. The message names the header and its value, cut to 100 bytes."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class WebGuard:
    """Middleware that refuses requests sent by web pages of other sites, and answers CORS preflights of origins in
    `security.origins`."""

    def __init__(
        self, app: ASGIApp, settings: ServiceSettings, security: SecuritySettings, *, accepts_forms: bool = False
    ) -> None:
        self._app = app
        self._accepts_forms = accepts_forms
        self._any_host = not is_loopback(settings.host) and not security.hosts
        """Whether any host name is accepted. Beyond loopback every request needs a key, which a page does not have."""
        self._hosts = (settings.host, socket.gethostname(), *security.hosts)
        self._origins = frozenset(origin.lower().encode() for origin in security.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").lower()
        try:
            is_permitted_origin = self._check(scope["method"], headers, origin)
        except Refusal as refusal:
            await _answer(send, refusal)
            return
        if not is_permitted_origin:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _answer_preflight(send, headers[b"origin"], headers)
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                cors = [(b"access-control-allow-origin", headers[b"origin"]), (b"vary", b"Origin")]
                message = {**message, "headers": [*message.get("headers", ()), *cors]}
            await send(message)

        await self._app(scope, receive, send_with_cors)

    def _check(self, method: str, headers: dict[bytes, bytes], origin: bytes) -> bool:
        """Check whether a request may be served.

        Returns:
            True if the request comes from a page of an origin in `security.origins`, whose response needs CORS headers;
            False for permitted requests without such an origin.

        Raises:
            Refusal: the host is not a name of this service, another site's page sent the request, or its body is not
                JSON.
        """
        host = headers.get(b"host")
        if host is not None and not self._any_host and not self._is_own(host):
            remedy = "call the service by its address, or add the name to security.hosts"
            raise Refusal(403, "host_not_allowed", f"Host {_quote(host)} is not a name of this service; {remedy}")
        is_permitted_origin = origin in self._origins
        if origin and not is_permitted_origin and origin.partition(b"://")[2] != (host or b"").lower():
            remedy = "a page of this origin may not call this service; add it to security.origins to allow it"
            raise Refusal(403, "origin_not_allowed", f"Origin {_quote(origin)}: {remedy}")
        if not is_permitted_origin and headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            raise Refusal(403, "cross_site", "Sec-Fetch-Site: a page of another site caused this request")
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if has_body and method not in _WITHOUT_EFFECT and not _JSON.fullmatch(headers.get(b"content-type", b"")):
            kind = headers.get(b"content-type")
            if self._accepts_forms and _FORM.fullmatch(kind or b""):
                _require_own_page(headers)
                return is_permitted_origin
            problem = f"Content-Type {_quote(kind)}" if kind else "no Content-Type"
            raise Refusal(415, "unsupported_media_type", f"{problem}: send the body as application/json")
        return is_permitted_origin

    def _is_own(self, host: bytes) -> bool:
        """Return whether the header `Host` is a known name of this service, or an IP address, which DNS rebinding
        cannot forge."""
        match = _HOST.fullmatch(host.decode("latin-1"))
        name = match["name"].strip("[]") if match else ""
        if not name:
            return False
        try:
            ip_address(name)
        except ValueError:
            return is_loopback(name.lower().rstrip(".")) or any(host_fits(name, pattern) for pattern in self._hosts)
        return True


def _require_own_page(headers: dict[bytes, bytes]) -> None:
    """Check that the browser reports a page of this service as the sender of a form. Raises `Refusal`.

    An `Origin` that differs from the host was refused before.
    """
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if site != b"same-origin" and (site is not None or not origin):
        raise Refusal(403, "foreign_form", "Origin: a form must be sent by a page of this service")


async def _answer(send: Send, refusal: Refusal) -> None:
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.code}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close"), (b"vary", b"Origin, Sec-Fetch-Site")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_preflight(send: Send, origin: bytes, headers: dict[bytes, bytes]) -> None:
    """Answer a CORS preflight with permission. The key of the actual request is checked when that request arrives."""
    allowed = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", _PREFLIGHT_AGE_S),
        (b"vary", b"Origin, Access-Control-Request-Headers"),
    ]
    if headers.get(b"access-control-request-private-network") == b"true":
        allowed.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


def _quote(value: bytes) -> str:
    """Return a header's value for a message: escaped, and cut to 100 bytes."""
    return ascii(value[:_SHOWN_MAX].decode("latin-1"))


log = get_logger(__name__)
_URL = re.compile(
    r"https?://(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]{0,256})?"
)
"""URL that all HTTP clients parse in the same way: without user, query and escapes."""
_LOGGED_MAX = 1024


def sign_replica(replica: Replica, security: SecuritySettings) -> Replica:
    """Return `replica` with the signature of its id and URL. The signature is empty without an internal key."""
    key = security.internal_key.get_secret_value()
    return replica.model_copy(update={"signature": _signature(replica, key) if key else ""})


class ReplicaTrust:
    """Decides whether the URLs in heartbeats of replicas may be called. A refused URL is logged once for each
    replica."""

    def __init__(self, security: SecuritySettings) -> None:
        self._key = security.internal_key.get_secret_value()
        self._hosts = security.replica_hosts
        self._logged_urls: OrderedDict[str, str] = OrderedDict()

    def accepts(self, replica: Replica) -> bool:
        """Return whether the replica's URL may be called.

        With an internal key its signature must be valid; without one it must be on loopback. Hosts in
        `security.replica_hosts` are accepted in both cases.
        """
        match = _URL.fullmatch(replica.url)
        host = match["host"].strip("[]") if match else ""
        if match and (self._is_genuine(replica) or any(host_fits(host, pattern) for pattern in self._hosts)):
            return True
        if self._logged_urls.get(replica.replica_id) != replica.url:
            self._logged_urls[replica.replica_id] = replica.url
            if len(self._logged_urls) > _LOGGED_MAX:
                self._logged_urls.popitem(last=False)
            log.warning("replica_refused", replica=replica.replica_id[:128], host=host[:128], problem=self._problem)
        return False

    def _is_genuine(self, replica: Replica) -> bool:
        if self._key:
            return hmac.compare_digest(_signature(replica, self._key), replica.signature)
        match = _URL.fullmatch(replica.url)
        return match is not None and is_loopback(match["host"].strip("[]"))

    @property
    def _problem(self) -> str:
        reason = "is not signed with security.internal_key" if self._key else "is not on loopback"
        return f"its heartbeat {reason}, and security.replica_hosts does not name its host; it gets no calls"


def _signature(replica: Replica, key: str) -> str:
    message = b"headrace replica\0" + b"\0".join(text.encode() for text in (replica.replica_id, replica.url))
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


class BrowserLogin:
    """Middleware that lets people log in with a browser: they enter their token as the password.

    The password of Basic authentication is passed on as a bearer token. After a response with status 401 the browser
    opens its login dialog.
    """

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
    """Return the bearer token in an `Authorization` header with Basic credentials, or any other value unchanged."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        password = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return authorization
    return b"Bearer " + password
