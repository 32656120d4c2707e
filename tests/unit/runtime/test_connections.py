"""Tests of the bounds on open connections and on responses that wait for their clients, by raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from unittest import mock

import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace_runtime.http import connections, protocol, web
from headrace_runtime.settings.sections import Common, SecuritySettings, ServiceSettings

CONNECTIONS_MAX = 20
KEY = "k" * 20
COMMON = Common(security=SecuritySettings(internal_key=SecretStr(KEY)))
LARGE_BYTES = 16 << 20
_release = asyncio.Event()


async def _private(request: Request) -> Response:
    web.require_internal_key(request, COMMON)
    return PlainTextResponse("private")


async def _large(_request: Request) -> Response:
    return Response(bytes(LARGE_BYTES))


async def _busy(_request: Request) -> Response:
    await _release.wait()
    return PlainTextResponse("done")


ROUTES = [Route("/private", _private), Route("/large", _large), Route("/busy", _busy)]
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    _release.clear()
    with mock.patch.object(connections, "connections_max", return_value=CONNECTIONS_MAX):
        async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port:
            yield port


@contextlib.asynccontextmanager
async def clients(port: int, count: int) -> AsyncIterator[list[Client]]:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def request(client: Client, path: str, *headers: str) -> bytes:
    """Return the head of the response, which is empty if the server closed the connection."""
    reader, writer = client
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(20):
            return await reader.readuntil(b"\r\n\r\n")
    return b""


async def is_closed(client: Client) -> bool:
    """Return whether the server has closed the connection."""
    try:
        async with asyncio.timeout(0.2):
            while await client[0].read(65_536):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("stranger", ["silent", "idle after a response", "refused", "slow header", "slow body"])
async def test_idle_strangers_make_room_for_others_and_a_client_with_a_key_stays(stranger: str) -> None:
    async with serving() as port, clients(port, 1) as (known,):
        assert b" 200 " in await request(known, "/private", f"Authorization: Bearer {KEY}")
        async with clients(port, 5 * CONNECTIONS_MAX) as strangers:
            for client in strangers:
                if stranger == "idle after a response":
                    await request(client, "/health")
                elif stranger == "refused":
                    await request(client, "/private", "Authorization: Bearer wrong")
                elif stranger == "slow header":
                    client[1].write(b"GET /private HTTP/1.1\r\nX: ")
                elif stranger == "slow body":
                    client[1].write(b"GET /private HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
            await asyncio.sleep(0.1)
            assert b" 200 " in await request(known, "/private", f"Authorization: Bearer {KEY}")
            is_open = [not closed for closed in await asyncio.gather(*map(is_closed, strangers))]
            assert sum(is_open) == CONNECTIONS_MAX - 1
            assert all(is_open[-(CONNECTIONS_MAX - 1) :]), "the connection that was idle longest is closed first"


async def test_requests_in_progress_stay_and_further_connections_are_refused() -> None:
    async with serving() as port, clients(port, CONNECTIONS_MAX) as busy:
        responses = [asyncio.create_task(request(client, "/busy")) for client in busy]
        await asyncio.sleep(0.3)
        async with clients(port, 3) as further:
            heads = [await request(client, "/health") for client in further]
        assert all(head.startswith(b"HTTP/1.1 503 ") for head in heads)
        _release.set()
        assert all(b" 200 " in head for head in await asyncio.gather(*responses))
        async with clients(port, 1) as (later,):
            assert b" 200 " in await request(later, "/health")


@contextlib.asynccontextmanager
async def slow_readers(port: int, count: int) -> AsyncIterator[list[socket.socket]]:
    """Open connections with small receive buffers that request the large response and read nothing."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        loop = asyncio.get_running_loop()
        for client in opened:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.sleep(0.05)
        yield opened


async def read(client: socket.socket, *, slow_s: float = 0.0) -> int:
    """Read 32 KiB every 50 ms for `slow_s` and the rest at once. Return the number of bytes that arrived."""
    loop, size_bytes = asyncio.get_running_loop(), 0
    slow_until_s = loop.time() + slow_s
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while size_bytes < LARGE_BYTES:
                is_slow = loop.time() < slow_until_s
                data = await loop.sock_recv(client, 32_768 if is_slow else 1 << 20)
                if not data:
                    break
                size_bytes += len(data)
                await asyncio.sleep(0.05 if is_slow else 0)
    return size_bytes


@pytest.mark.parametrize("wait_s", [1.0, 60.0])
async def test_a_response_has_a_time_in_which_its_client_must_read_it(
    wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(protocol, "_RESPONSE_WAIT_S", wait_s)
    async with serving() as port, slow_readers(port, 1) as (client,):
        assert (await read(client, slow_s=3.0) >= LARGE_BYTES) == (wait_s > 3.0)


async def test_the_bytes_that_wait_for_slow_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_BYTES_MAX", 3 * LARGE_BYTES)
    async with serving() as port, slow_readers(port, 8) as opened:
        whole = [await read(client) >= LARGE_BYTES for client in opened]
        assert whole == [False] * 5 + [True] * 3, "the response that has waited longest is given up first"
