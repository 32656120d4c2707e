"""Every server of ours refuses requests of web pages, and accepts requests of clients."""

from __future__ import annotations

import itertools
import random
import socket
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime.http import web
from headrace_runtime.http.guard import WebGuard
from headrace_runtime.settings.sections import SecuritySettings, ServiceSettings
from tests.support.seeds import draw_seed

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
JSON = {"content-type": "application/json"}


class Served:
    """Requests that reached the application behind the guard."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def answer(self, request: Request) -> Response:
        self.requests.append(f"{request.method} {(await request.body()).decode()}")
        return JSONResponse({"secret": "model names"})


async def status_of(
    method: str, headers: dict[str, str], *, body: bytes = b"", **security: Any
) -> tuple[int, Served, httpx2.Response]:
    """Return the status of one request, the served requests, and the response."""
    served, settings = Served(), ServiceSettings(host=security.pop("listens_on", "127.0.0.1"))
    application = web.app({}, [Route("/v1/{path:path}", served.answer, methods=METHODS)])
    transport = httpx2.ASGITransport(WebGuard(application, settings, SecuritySettings(**security)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        response = await client.request(method, "/v1/x", headers=headers, content=body or None)
    return response.status_code, served, response


HOSTS_REFUSED = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80", "localhost@a.example",
    "evil.example#127.0.0.1", "[::1].evil.example", "", ":8000", "evil.example.", "xn--80ak6aa.com", "127.0.0.1:80:80",
    "gateway", "metadata.google.internal", "localhost,evil.example", "localhost evil.example", "0x7f000001.example",
]  # fmt: skip
HOSTS_TAKEN = [
    "127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:1", "localhost.:80", "[::1]:8000", "10.1.2.3:8000",
    "127.9.9.9", socket.gethostname(),
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS_REFUSED)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_name_that_is_not_ours_is_refused(host: str, method: str) -> None:
    status, served, response = await status_of(method, {"host": host, **JSON}, body=b"{}" if method == "POST" else b"")
    assert (status, served.requests) == (403, [])
    assert "secret" not in response.text
    assert "security.hosts" in response.json()["error"]["message"]


@pytest.mark.parametrize("host", HOSTS_TAKEN)
async def test_addresses_and_own_names_are_taken(host: str) -> None:
    assert (await status_of("GET", {"host": host}))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("llm.example.com", 200),
        ("LLM.example.com:443", 200),
        ("a.svc", 200),
        ("a.b.svc", 200),
        ("svc", 403),
        ("asvc", 403),
    ],
)
async def test_a_setting_names_further_hosts(host: str, status: int) -> None:
    assert (await status_of("GET", {"host": host}, hosts=("llm.example.com", "*.svc")))[0] == status


async def test_beyond_loopback_names_count_only_where_they_are_set() -> None:
    named = {"host": "headrace-gateway.agents.svc:8000"}
    assert (await status_of("GET", named, listens_on="0.0.0.0"))[0] == 200
    assert (await status_of("GET", named, listens_on="0.0.0.0", hosts=("other",)))[0] == 403
    assert (await status_of("GET", named, listens_on="127.0.0.2", hosts=("headrace-gateway.agents.svc",)))[0] == 200


ORIGINS = [
    "https://evil.example", "http://evil.example:8000", "null", "file://", "http://localhost:3000", "https://127.0.0.1",
    "http://127.0.0.1:8001", "http://127.0.0.1:8000.evil.example", "chrome-extension://abc",
]  # fmt: skip
SITES = ["cross-site", "same-site", "Cross-Site", "nonsense"]


def requests_of_pages() -> list[tuple[str, dict[str, str]]]:
    """Return every mixture of method and headers by which a browser marks a request of another site."""
    requests = []
    for method, origin, site in itertools.product(METHODS, [None, *ORIGINS], [None, *SITES]):
        if origin or site:
            headers = {name: value for name, value in (("origin", origin), ("sec-fetch-site", site)) if value}
            requests.append((method, headers))
    return requests


async def test_no_request_of_another_site_is_served() -> None:
    seed = draw_seed()
    rng, wrong = random.Random(seed), []
    kinds = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json"]
    for method, headers in requests_of_pages():
        body = b"{}" if method not in ("GET", "HEAD", "OPTIONS") and rng.random() < 0.7 else b""
        more = {"content-type": rng.choice(kinds)} if body else {}
        status, served, response = await status_of(method, {**headers, **more}, body=body)
        if served.requests or status not in (403, 415) or "access-control-allow-origin" in response.headers:
            wrong.append((method, headers, status))
    assert not wrong


KINDS = [
    None, "", "text/plain", "text/json", "application/x-www-form-urlencoded", "application/jsonx",
    "multipart/form-data", "application/octet-stream", "text/plain; application/json",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_body_has_to_be_json(kind: str | None, method: str) -> None:
    headers = {} if kind is None else {"content-type": kind}
    status, served, response = await status_of(method, headers, body=b'{"paused": true}')
    assert (status, served.requests) == (415, [])
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("POST", {"content-type": "application/json", "authorization": "Bearer dummy"}, b"{}"),
        ("POST", {"content-type": "application/json; charset=utf-8"}, b"{}"),
        ("POST", {"content-type": "Application/JSON;charset=UTF-8"}, b"{}"),
        ("POST", {"content-type": "application/vnd.api+json"}, b"{}"),
        ("POST", {}, b""),
        ("POST", {"content-length": "0", "content-type": "text/plain"}, b""),
        ("DELETE", {}, b""),
        ("GET", {"sec-fetch-site": "none"}, b""),
        ("GET", {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8000"}, b""),
        ("GET", {"sec-fetch-mode": "cors", "user-agent": "node"}, b""),
        ("HEAD", {}, b""),
    ],
)
async def test_what_clients_send_is_served(method: str, headers: dict[str, str], body: bytes) -> None:
    status, served, _ = await status_of(method, headers, body=body)
    assert status == 200
    assert served.requests == [f"{method} {body.decode()}"]


async def test_a_named_origin_may_read_and_ask_first() -> None:
    page = {"origin": "https://chat.example.com", "sec-fetch-site": "cross-site"}
    settings: dict[str, Any] = {"origins": ("https://chat.example.com",)}
    requested_headers = "authorization,content-type"
    preflight = {**page, "access-control-request-method": "POST", "access-control-request-headers": requested_headers}
    status, served, response = await status_of("OPTIONS", preflight, **settings)
    assert (status, served.requests) == (204, [])
    assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert response.headers["access-control-allow-headers"] == requested_headers
    status, served, response = await status_of("POST", {**page, **JSON}, body=b"{}", **settings)
    assert (status, served.requests) == (200, ["POST {}"])
    assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "access-control-allow-credentials" not in response.headers
    assert (await status_of("POST", {**page, "content-type": "text/plain"}, body=b"{}", **settings))[0] == 415
    longer = {**page, **JSON, "origin": "https://chat.example.com.evil.example"}
    assert (await status_of("POST", longer, **settings))[0] == 403
    assert (await status_of("GET", {"sec-fetch-site": "cross-site"}, **settings))[0] == 403


def test_origins_are_checked() -> None:
    for wrong in ("*", "chat.example.com", "https://chat.example.com/path", "https://a@b"):
        with pytest.raises(ValidationError):
            SecuritySettings(origins=(wrong,))


async def test_every_server_has_the_guard() -> None:
    async with web.serve(web.app({}), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/health"
        assert (await client.get(url)).status_code == 200
        assert (await client.get(url, headers={"host": "evil.example"})).status_code == 403
        assert (await client.get(url, headers={"origin": "https://evil.example"})).status_code == 403
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
                   "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "origin": "https://evil.example"}  # fmt: skip
        assert (await client.get(url, headers=upgrade)).status_code == 403
