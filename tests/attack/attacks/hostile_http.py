"""Clients that send slowly, ambiguously or no request at all, beside well-behaved clients that must be served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2

from headrace_runtime.http.protocol import BODY_TIMEOUT_S, HEADER_TIMEOUT_S
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import routing
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, at_most, none_of

TITLE = "slow, silent and ambiguous HTTP"
SLOW = 300
SILENT = 1000
AMBIGUOUS = 10
SLACK_S = 5.0
PACE_S = 0.5
MARK = "smuggled"
_TARGET = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
HEADS = {
    "both lengths": b"Content-Length: %d\r\n" + _CHUNKED,
    "both lengths, turned round": _CHUNKED + b"Content-Length: %d\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: %d\r\n",
    "two codings": _CHUNKED + _CHUNKED + b"X: %d\r\n",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\nContent-Length: %d\r\n",
    "a bare CR": b"X: y\rTransfer-Encoding: chunked\r\nContent-Length: %d\r\n",
    "a signed length": b"Content-Length: +%d\r\n",
}


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    gateway = GatewayProcess(folder / "data", broker.address)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        replica = await stack.enter_async_context(FakeReplica().running())
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        stack.callback(gateway.stop)
        await view.producer.send(routing(replica.versions[0]))
        await view.producer.send(replica.heartbeat(ttl_s=600))
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        async with _behaving(gateway.url) as seen:
            silent = [asyncio.create_task(_closed_after(gateway.port, b"", b"")) for _ in range(SILENT)]
            headers = [asyncio.create_task(_closed_after(gateway.port, _TARGET + b"X: ", b"x")) for _ in range(SLOW)]
            bodies = [
                asyncio.create_task(_closed_after(gateway.port, _TARGET + b"Content-Length: 99999\r\n\r\n", b"x"))
                for _ in range(SLOW)
            ]
            answered_twice, attempts = await _ambiguous(gateway.port, rng)
            slow_s = [max(await asyncio.gather(*tasks)) for tasks in (silent, headers, bodies)]
        smuggled = sum(MARK in json.dumps(request) for request in replica.requests)
    return [
        at_most(f"{SILENT} connections that say nothing, closed after", slow_s[0], HEADER_TIMEOUT_S + SLACK_S, " s"),
        at_most(f"{SLOW} headers of a byte now and then, closed after", slow_s[1], HEADER_TIMEOUT_S + SLACK_S, " s"),
        at_most(f"{SLOW} bodies of a byte now and then, closed after", slow_s[2], BODY_TIMEOUT_S + SLACK_S, " s"),
        none_of("ambiguous requests that were served or left their connection open", answered_twice, attempts),
        none_of("requests smuggled in behind them that reached a replica", smuggled, attempts),
        none_of("failed calls of clients that behave", seen.count(0), len(seen)),
    ]


async def _closed_after(port: int, start: bytes, drip: bytes) -> float:
    """Send `start`, then `drip` again and again. Return the seconds until the gateway closes the connection, else
    infinity.
    """
    began = time.monotonic()
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(3 * (HEADER_TIMEOUT_S + BODY_TIMEOUT_S)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            dripping = asyncio.create_task(_drip(writer, drip))
            try:
                while await reader.read(65_536):
                    pass
            finally:
                dripping.cancel()
                writer.close()
            return round(time.monotonic() - began, 1)
    if time.monotonic() - began < 3 * (HEADER_TIMEOUT_S + BODY_TIMEOUT_S):
        return round(time.monotonic() - began, 1)
    return float("inf")


async def _drip(writer: asyncio.StreamWriter, drip: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while drip:
            await asyncio.sleep(PACE_S)
            writer.write(drip)
            await writer.drain()


async def _ambiguous(port: int, rng: random.Random) -> tuple[int, int]:
    """Send ambiguous requests. Return the number of those that got anything but one refusal and a closed connection,
    and of all.
    """
    names = [name for name in HEADS for _ in range(AMBIGUOUS)]
    rng.shuffle(names)
    wrong = 0
    for name in names:
        hidden = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": MARK}]}).encode()
        inner = _TARGET + b"Content-Length: %d\r\n\r\n%b" % (len(hidden), hidden)
        body = b"0\r\n\r\n" + inner
        answer = await _answer(port, _TARGET + HEADS[name] % len(body) + b"\r\n" + body)
        refused = answer is not None and answer.count(b"HTTP/1.1 ") == 1 and answer[9:10] in (b"4", b"5")
        if not refused:
            print(f"    {name}: {answer!r:.300}")
        wrong += not refused
    return wrong, len(names)


async def _answer(port: int, data: bytes) -> bytes | None:
    """Send `data` and return all bytes until the connection is closed, or None if the gateway leaves it open."""
    answer = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(HEADER_TIMEOUT_S / 2):
            with contextlib.suppress(ConnectionError):
                while more := await reader.read(65_536):
                    answer += more
            return answer
    except TimeoutError:
        return None
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def _behaving(url: str) -> AsyncIterator[list[int]]:
    """Call the gateway in sequence during the block. Yield a list that gets 1 for each answered call and 0 for any
    other.
    """
    seen: list[int] = []

    async def call() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            while True:
                body = {"model": "tiny", "messages": [{"role": "user", "content": f"question {len(seen)}"}]}
                with contextlib.suppress(httpx2.HTTPError):
                    answer = await client.post("/v1/chat/completions", json=body)
                    seen.append(int(answer.status_code == 200))
                    continue
                seen.append(0)

    task = asyncio.create_task(call())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
