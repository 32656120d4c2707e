"""Tests of protection against web pages and forged replicas.

Every server refuses requests from other sites' pages and accepts requests of clients. A replica's URL is called only if
the replica signed it or a setting names its host.
"""

from __future__ import annotations

import itertools
import random
import socket
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime.http import web
from headrace_runtime.http.guard import ReplicaTrust, WebGuard, sign_replica
from headrace_runtime.settings.sections import SecuritySettings, ServiceSettings
from headrace_schemas import Replica
from tests.support.fake_replica import FakeReplica
from tests.support.presence import draw_seed

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
    """Return each combination of method and headers by which a browser marks a request of another site."""
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


KEYED = SecuritySettings(internal_key=SecretStr("between-us"))
GENUINE = sign_replica(FakeReplica("replica-0", url="http://10.0.0.7:8010").heartbeat(), KEYED)


def forged(rng: random.Random) -> Replica:
    """Return a heartbeat that a sender without the key could write, with copied genuine signatures."""
    hosts = [
        "evil.example",
        "10.0.0.8",
        "127.0.0.1",
        "[::1]",
        "10.0.0.7.evil.example",
        "10.0.0.7@evil.example",
        "0x7f.1",
    ]
    url = rng.choice((
        f"http://{rng.choice(hosts)}:{rng.randrange(70_000)}",
        f"{GENUINE.url}{rng.choice(('@evil.example', '/../x', '.evil.example', '0', '/', '?x', '#'))}",
        "http://evil.example\\@10.0.0.7:8010", "http://evil.example/\n10.0.0.7", f"gopher://{rng.choice(hosts)}",
    ))  # fmt: skip
    other_security = SecuritySettings(internal_key=SecretStr(rng.randbytes(8).hex()))
    base = GENUINE.model_copy(update={"url": url, "replica_id": rng.choice(("replica-0", "replica-1", "é\0"))})
    signature = rng.choice(("", "0" * 64, GENUINE.signature, sign_replica(base, other_security).signature))
    return base.model_copy(update={"signature": signature})


def test_a_forged_heartbeat_is_never_accepted() -> None:
    seed = draw_seed()
    rng, trust = random.Random(seed), ReplicaTrust(KEYED)
    assert trust.accepts(GENUINE)
    assert not [replica.url for replica in (forged(rng) for _ in range(1000)) if trust.accepts(replica)]
    assert len(trust._logged_urls) <= 3, "what is logged is bounded by the replicas that are named"


def test_what_is_remembered_of_refused_replicas_is_bounded() -> None:
    trust = ReplicaTrust(KEYED)
    for number in range(3000):
        assert not trust.accepts(FakeReplica(f"replica-{number}", url="http://evil.example").heartbeat())
    assert len(trust._logged_urls) == 1024


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://127.0.0.1:8010", True),
        ("http://[::1]:8010", True),
        ("http://localhost:8010", True),
        ("http://10.0.0.7:8010", False),
        ("http://replica:8010", False),
        ("http://localhost.evil.example:8010", False),
        ("file:///etc/passwd", False),
    ],
)
def test_without_a_key_loopback_alone_is_accepted(url: str, accepted: bool) -> None:
    assert ReplicaTrust(SecuritySettings()).accepts(FakeReplica(url=url).heartbeat()) is accepted


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://gpu-1:8010", True),
        ("http://GPU-1:8010/path", True),
        ("https://a.replicas.internal:8010", True),
        ("http://replicas.internal:8010", False),
        ("http://evilreplicas.internal:8010", False),
        ("http://gpu-1.evil.example:8010", False),
        ("http://gpu-1@evil.example:8010", False),
        ("http://evil.example#gpu-1", False),
        ("http://evil.example\\gpu-1", False),
        ("http://gpu-1:99999999", False),
        ("ftp://gpu-1:8010", False),
    ],
)
@pytest.mark.parametrize("key", ["", "between-us"])
def test_a_setting_names_hosts_that_need_no_signature(url: str, accepted: bool, key: str) -> None:
    settings = SecuritySettings(internal_key=SecretStr(key), replica_hosts=("gpu-1", "*.replicas.internal"))
    assert ReplicaTrust(settings).accepts(FakeReplica(url=url).heartbeat()) is accepted


def test_patterns_are_checked() -> None:
    for wrong in ("", "http://gpu-1", "gpu-1:*", "a*b", "*.*"):
        with pytest.raises(ValidationError):
            SecuritySettings(replica_hosts=(wrong,))


def test_a_heartbeat_of_an_older_release_is_read() -> None:
    text = GENUINE.model_copy(update={"signature": ""}).to_json().replace(b',"signature":""', b"")
    assert b"signature" not in text
    assert Replica.from_json(text).signature == ""
