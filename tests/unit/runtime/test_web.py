"""Tests of the routes that every service has, on a real socket, and of memory that tenants share.

The shared memory stays within its limit, and a tenant that fills it loses only its own entries.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote_from_bytes

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace_runtime import metrics
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.http import protocol, web
from headrace_runtime.settings.sections import Common, SecuritySettings, ServiceSettings
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas.values.ids import decode_name
from tests.support.machine import full_error
from tests.support.presence import draw_seed

HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"


async def _echo(request: Request) -> Response:
    return JSONResponse({"size": len(await request.body())})


async def _guarded(request: Request) -> Response:
    web.require_internal_key(request, Common(security=SecuritySettings.model_validate({"internal_key": "secret"})))
    return JSONResponse({})


ROUTES = [Route("/echo", _echo, methods=["POST"]), Route("/guarded", _guarded, methods=["GET", "POST"])]


async def test_health_says_which_check_does_not_hold() -> None:
    async def database() -> bool:
        return False

    application = web.app({"bus": lambda: True, "database": database}, ROUTES)
    async with web.serve(application, ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "unready", "checks": {"bus": True, "database": False}}
        metrics.OUTBOX_ROWS.set(0)
        page = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert "headrace_outbox_rows 0.0" in page.text


async def test_health_gives_the_reason_where_there_is_one() -> None:
    why = "disk: no space left on postgresql://me:PLANTED@db/x"
    async with web.serve(web.app({"store": lambda: why}), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/health")
    assert (answer.status_code, answer.json()["checks"]) == (503, {"store": False})
    assert answer.json()["reasons"] == {"store": "disk: no space left on postgresql://me:(hidden)@db/x"}


@pytest.mark.parametrize("needed", [True, False])
async def test_health_tells_of_a_full_disk_also_where_work_goes_on_without_it(tmp_path: Path, needed: bool) -> None:
    application = web.app({}, common=Common(data_dir=tmp_path), needs_disk=needed)
    async with web.serve(application, ServiceSettings()) as port, httpx2.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        with full_error():
            answer = await client.get(f"http://127.0.0.1:{port}/health")
    assert answer.status_code == (503 if needed else 200)
    assert f"no space left on {tmp_path}" in answer.json()["reasons"]["disk"]


async def test_metrics_need_the_internal_key_where_there_is_one(tmp_path: Path) -> None:
    common = Common(data_dir=tmp_path, security=SecuritySettings.model_validate({"internal_key": "secret"}))
    async with web.serve(web.app({}, common=common), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        page = f"http://127.0.0.1:{port}/metrics"
        assert (await client.get(page)).status_code == 401
        assert (await client.get(page, headers={"authorization": "Bearer secret"})).status_code == 200


async def test_a_request_that_offers_h2c_keeps_its_body() -> None:
    """Pitfall 29: every JDK HTTP client sends this upgrade header to a plain http:// URL."""
    async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /echo HTTP/1.1\r\n" + HEADERS + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Length: 5\r\n\r\nhello"
        )
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 5)
        writer.close()
    assert b" 200 " in answer
    assert answer.endswith(b'{"size":5}')


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"authorization": "Bearer secret"}, 200)])
async def test_the_internal_key_guards(headers: dict[str, str], status: int) -> None:
    async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/guarded", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "credentials", "status"),
    [
        ("GET", b"headrace:secret", 200),
        ("HEAD", b":secret", 200),
        ("GET", b"secret:headrace", 401),
        ("GET", b"headrace:", 401),
        ("GET", b"headrace:secret\n", 401),
        ("GET", b"\xff\xfe:\x00", 401),
        ("POST", b"headrace:secret", 401),
    ],
)
async def test_the_token_is_the_password_of_a_browser_that_reads(method: str, credentials: bytes, status: int) -> None:
    headers = {"authorization": f"Basic {base64.b64encode(credentials).decode()}", "accept": "text/html,*/*"}
    async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.request(method, f"http://127.0.0.1:{port}/guarded", headers=headers)
    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401 and method == "GET")


@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/html,application/xhtml+xml"])
@pytest.mark.parametrize("authorization", ["", "Basic", "Basic %%%", "Basic aGVhZHJhY2U", "Basic \u00e9", "Bearer x"])
async def test_only_a_page_without_the_token_makes_a_browser_ask_for_it(accept: str, authorization: str) -> None:
    headers = [(b"accept", accept.encode()), (b"authorization", authorization.encode("latin-1"))]
    async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/guarded", headers=headers)
    assert answer.status_code == 401
    assert answer.headers.get("www-authenticate", "").startswith("Basic ") == ("text/html" in accept)


async def test_an_application_with_a_login_page_makes_no_browser_ask_for_a_password() -> None:
    serving = web.serve(web.app({}, ROUTES), ServiceSettings(), accepts_forms=True)
    async with serving as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/guarded", headers={"accept": "text/html"})
    assert answer.status_code == 401
    assert "www-authenticate" not in answer.headers


class _Stream:
    """Endless response that records whether the application has ended it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def respond(self, _request: Request) -> Response:
        return StreamingResponse(self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(65_536)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def _open_stream(port: int) -> socket.socket:
    """Return a connection with a small receive buffer that has requested the stream."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client


async def test_a_client_that_stops_reading_is_closed_and_its_response_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_READ_TIMEOUT_S", 0.5)
    stream = _Stream()
    async with web.serve(web.app({}, [Route("/stream", stream.respond)]), ServiceSettings()) as port:
        with await _open_stream(port):
            async with asyncio.timeout(20):
                await stream.ended.wait()


async def test_a_client_that_reads_slowly_keeps_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_READ_TIMEOUT_S", 0.5)
    stream, loop = _Stream(), asyncio.get_running_loop()
    async with web.serve(web.app({}, [Route("/stream", stream.respond)]), ServiceSettings()) as port:
        with await _open_stream(port) as client:
            for _ in range(25):
                assert await loop.sock_recv(client, 65_536)
                await asyncio.sleep(0.1)
            assert not stream.ended.is_set()


def test_a_refusal_carries_what_a_client_needs() -> None:
    error = Refused(400, "bad", "no such thing", "model")
    assert (error.status, error.code, error.param) == (400, "bad", "model")


async def test_a_taken_port_is_an_error_not_a_hang() -> None:
    async with web.serve(web.app({}), ServiceSettings()) as port:
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            async with web.serve(web.app({}), ServiceSettings(port=port)):
                pass


HANDED = """
import asyncio, os
from headrace_runtime.http import protocol, web
from headrace_runtime.settings.sections import ServiceSettings

os.dup2(int(os.environ["GIVEN"]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": os.environ.get("MEANT", str(os.getpid()))}
async def main():
    async with web.serve(web.app({}), ServiceSettings(port=int(os.environ["PORT"]))) as port:
        print(port, "LISTEN_PID" in os.environ, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def handed(listener: socket.socket, **environ: str) -> subprocess.Popen[str]:
    """Start a process that is given `listener` as by systemd."""
    variables = {"PORT": str(listener.getsockname()[1]), "GIVEN": str(listener.fileno()), **environ}
    return subprocess.Popen(
        [sys.executable, "-c", HANDED],
        env={**os.environ, **variables},
        pass_fds=[listener.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_socket_that_is_handed_over_is_listened_on_and_outlives_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        first = handed(listener)
        assert first.stdout is not None
        assert first.stdout.readline().split() == [str(port), "False"], "children do not take it for theirs"
        first.kill()
        first.wait()
        with socket.create_connection(("127.0.0.1", port), 10) as early:  # between two lives
            early.settimeout(30)
            early.sendall(b"GET /health HTTP/1.1\r\n" + HEADERS + b"Connection: close\r\n\r\n")
            second = handed(listener)
            try:
                assert early.recv(100).startswith(b"HTTP/1.1 200")
            finally:
                second.kill()
                second.communicate()


@pytest.mark.parametrize("environ", [{"PORT": "1"}, {"MEANT": "1"}], ids=["another port", "somebody else's"])
def test_a_socket_that_is_not_ours_is_not_taken(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, stderr = handed(listener, **environ).communicate(timeout=30)
    assert "listens on" in stderr or "cannot listen on" in stderr


def test_a_socket_for_everybody_is_not_taken_for_a_loopback_address() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        stderr = handed(listener).communicate(timeout=30)[1]
    assert "0.0.0.0" in stderr


async def _parameters(request: Request) -> Response:
    return JSONResponse(web.parameters_of(request, "name", "tenant"))


_PARAMETERS = web.app({}, [Route("/parameters", _parameters)])


async def test_query_parameters_that_differ_in_one_byte_are_different_names() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    words = {
        bytes(rng.choice(b"mM\xc3\xbc\xfc\xff\x80a %+&=\xe2") for _ in range(rng.randint(1, 6))) for _ in range(300)
    }
    words |= {"müller".encode(), "müller".encode("latin-1"), "möller".encode("latin-1"), b"m\xfcller", b"m\xffller"}
    names = {}
    async with web.serve(_PARAMETERS, ServiceSettings()) as port, httpx2.AsyncClient() as client:
        for word in words:
            answer = await client.get(f"http://127.0.0.1:{port}/parameters?name={quote_from_bytes(word, safe='')}")
            assert answer.status_code == 200, word
            names[word] = answer.json()["name"]
    assert names == {word: decode_name(word) for word in words}
    assert "\ufffd" not in "".join(names.values())


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("name=a&tennant=b", "unknown_parameter"),
        ("name=a&name=b", "repeated_parameter"),
        ("%ff=a", "unknown_parameter"),
        ("name", None),
        ("name=a&name=a", None),
        ("&&", None),
    ],
)
async def test_unknown_and_repeated_query_parameters_are_refused(query: str, code: str | None) -> None:
    async with web.serve(_PARAMETERS, ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/parameters?{query}")
    assert answer.status_code == (400 if code else 200)
    assert code is None or answer.json()["error"]["code"] == code


def test_no_service_reads_query_parameters_in_another_way() -> None:
    """Starlette's own parser replaces invalid UTF-8, so two different names would become equal."""
    root = Path(web.__file__).parents[5]
    sources = [
        path for folder in ("gateway", "packages/runtime", "services") for path in (root / folder).rglob("src/**/*.py")
    ]
    assert len(sources) > 100
    readers = [path for path in sources if re.search(r"query_params|parse_qs|QueryParams", path.read_text())]
    assert [path.parts[-4:] for path in readers] == [("src", "headrace_console", "pages", "page.py")], "a form's body"


@pytest.mark.parametrize("path", ["/a%00b", "/echo?x=%00", "/echo?%00=x", "/%00/health"])
async def test_a_path_or_a_query_with_nul_is_refused_by_name(path: str) -> None:
    application = web.app({}, ROUTES)
    async with web.serve(application, ServiceSettings()) as port, httpx2.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        assert answer.json()["error"]["param"] == ("query" if "?" in path else "path")
        assert (await client.get(f"http://127.0.0.1:{port}/a%2500b")).status_code == 404


@pytest.mark.parametrize("case", range(20))
def test_a_memory_is_as_its_description(case: int) -> None:
    """Compare each call with a plain list of all entries."""
    rng = random.Random(draw_seed())
    size_max = rng.choice((1, 5, 20))
    memory: TenantMemory[int, int] = TenantMemory(size_max)
    expected: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
    for value in range(300):
        tenant, key = rng.choice("aab"), rng.randrange(8)
        match rng.choice(("get", "set", "set", "pop")):
            case "get":
                entry = expected.get((tenant, key))
                assert memory.get(tenant, key) == (entry[0] if entry else None)
                if entry is not None:
                    expected.move_to_end((tenant, key))
            case "set":
                size = rng.randrange(1, 8)
                expected.pop((tenant, key), None)
                if size <= size_max:
                    expected[tenant, key] = value, size
                forgotten = _forget(expected, size_max)
                assert memory.set(tenant, key, value, size) == (forgotten if size <= size_max else [value])
            case "pop":
                entry = expected.pop((tenant, key), None)
                assert memory.pop(tenant, key) == (entry[0] if entry else None)
        assert len(memory) == len(expected)
        assert memory.size == sum(size for _, size in expected.values())
    assert all(memory.get(tenant, key) == value for (tenant, key), (value, _) in expected.items())


def _forget(entries: OrderedDict[tuple[str, int], tuple[int, int]], size_max: int) -> list[int]:
    """Remove the oldest entries of the larger tenant until the rest fits, and return their values."""
    forgotten = []
    while sum(size for _, size in entries.values()) > size_max:
        sizes = {name: sum(size for (tenant, _), (_, size) in entries.items() if tenant == name) for name in "ab"}
        largest = max(sizes, key=lambda name: (sizes[name], name))
        forgotten.append(entries.pop(next(entry for entry in entries if entry[0] == largest))[0])
    return forgotten


def test_a_greedy_tenant_forgets_its_own_entries() -> None:
    memory: TenantMemory[int, str] = TenantMemory(100)
    for number in range(40):
        memory.set("modest", number, "kept")
    for number in range(1000):
        memory.set("greedy", number, "passing")
    assert [memory.get("modest", number) for number in range(40)] == ["kept"] * 40
    assert len(memory) == 100
