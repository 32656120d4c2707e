"""The pages that every service has, on a real socket."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime import metrics, web
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.settings import Common, SecuritySettings, ServiceSettings


async def _echo(request: Request) -> Response:
    return JSONResponse({"size": len(await request.body())})


async def _guarded(request: Request) -> Response:
    web.require_internal_key(request, Common(security=SecuritySettings(internal_key="secret")))
    return JSONResponse({})


ROUTES = [Route("/echo", _echo, methods=["POST"]), Route("/guarded", _guarded)]


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


async def test_a_request_that_offers_h2c_keeps_its_body() -> None:
    """Pitfall 29: every JDK HTTP client sends this on a plain http:// URL."""
    async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
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


def test_a_refusal_carries_what_a_client_needs() -> None:
    error = Refused(400, "bad", "no such thing", "model")
    assert (error.status, error.code, error.param) == (400, "bad", "model")


async def test_a_taken_port_is_an_error_not_a_hang() -> None:
    async with web.serve(web.app({}), ServiceSettings()) as port:
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            async with web.serve(web.app({}), ServiceSettings(port=port)):
                pass
