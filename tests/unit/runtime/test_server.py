"""Tests of event loop blocking and of the HTTP server.

Work that blocks an event loop is measured even on a busy machine; work in threads is not counted. The server handles
slow, ambiguous and oversized requests, which raw sockets send.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator
from unittest import mock

import pytest
from prometheus_client import REGISTRY
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime.http import protocol, web
from headrace_runtime.process.event_loop import INTERVAL_S, LoopWatch, WorkerThreads, watch_loop
from headrace_runtime.settings.sections import ServiceSettings
from tests.support.machine import blocked


def compute(cpu_s: float) -> str:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass
    return threading.current_thread().name


async def test_large_work_of_a_tenant_waits_for_its_own_and_not_before_that_of_others() -> None:
    threads, order = WorkerThreads(2, inline_bytes=10), list[str]()
    begun, release = threading.Semaphore(0), threading.Event()

    def work(name: str) -> None:
        order.append(f"{name} begins")
        begun.release()
        assert release.wait(10)
        order.append(f"{name} ends")

    try:
        flood = [asyncio.create_task(threads.run(11, lambda: work("flood"), "mallory")) for _ in range(3)]
        await asyncio.sleep(0)
        other = asyncio.create_task(threads.run(11, lambda: work("other"), "alice"))
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        assert order == ["flood begins", "other begins"]
        release.set()
        await asyncio.gather(other, *flood)
        assert [entry for entry in order if entry.startswith("flood")] == ["flood begins", "flood ends"] * 3
        flood = [asyncio.create_task(threads.run(11, lambda: None, "mallory")) for _ in range(3)]
        await asyncio.sleep(0)
        flood[1].cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert [task.cancelled() for task in flood] == [False, True, False]
    finally:
        threads.close()


@pytest.mark.parametrize("company", [False, True])
async def test_a_tenant_rests_after_long_work_while_others_have_requests(company: bool) -> None:
    threads = WorkerThreads(1, inline_bytes=10)
    try:
        await threads.run(11, lambda: time.sleep(0.5), "mallory")
        if company:
            await threads.run(11, lambda: None, "alice")
        began_s = time.monotonic()
        await threads.run(11, lambda: None, "mallory")
        assert (time.monotonic() - began_s > 0.4) == company
    finally:
        threads.close()


async def test_one_long_callback_is_seen_and_many_short_ones_are_none() -> None:
    async with blocked() as block:
        compute(0.15)
    assert block.busy_s >= 0.15
    async with blocked() as block:
        for _ in range(30):
            compute(0.005)
            await asyncio.sleep(0)
    assert block.busy_s < 0.1


async def test_no_garbage_is_collected_in_a_measured_block() -> None:
    def collections() -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    before = collections()
    async with blocked():
        lists = [[number] for number in range(100_000)]
        assert collections() == before
    lists += [[number] for number in range(100_000)]
    assert collections() > before


async def test_work_on_much_is_done_beside_the_loop() -> None:
    threads = WorkerThreads(1, inline_bytes=10)
    try:
        async with blocked() as block:
            names = [await threads.run(size, lambda: compute(0.15)) for size in (11, 10_000_000)]
        assert block.busy_s < 0.1
        assert len({*names, threading.current_thread().name}) == 3, "what is large has a thread of its own"
        assert await threads.run(10, lambda: compute(0)) == threading.current_thread().name
        with pytest.raises(ZeroDivisionError):
            await threads.run(11, lambda: 1 // 0)
    finally:
        threads.close()


async def test_the_longest_block_is_a_metric_and_forgotten_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_runtime.process.event_loop._WINDOW_S", 0.05)
    watch = LoopWatch(0.001)
    running = asyncio.create_task(watch.run())

    def gauge() -> float:
        return REGISTRY.get_sample_value("headrace_event_loop_block_seconds", {"kind": "busy"}) or 0.0

    await asyncio.sleep(0)
    compute(0.2)
    await asyncio.sleep(0.02)
    assert gauge() >= 0.2
    async with asyncio.timeout(30):
        while gauge() >= 0.2:  # noqa: ASYNC110 (a gauge tells nobody)
            await asyncio.sleep(0.01)
    running.cancel()


async def test_a_service_is_watched_as_long_as_it_runs() -> None:
    async def work() -> None:
        assert "loop-watch" in {task.get_name() for task in asyncio.all_tasks()}

    await watch_loop(work())
    await asyncio.sleep(0)
    assert "loop-watch" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize("seed", range(3))
async def test_watch_at_its_own_interval_sees_each_block_and_wakes_the_loop_seldom(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    watch = LoopWatch()
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    for _ in range(5):  # wherever in the interval a block begins and ends
        await asyncio.sleep(chance.uniform(0.0, INTERVAL_S / 4))
        watch.take("busy"), watch.take("late")
        block_s = chance.uniform(0.05, INTERVAL_S / 2)
        compute(block_s)
        await asyncio.sleep(0.001)
        assert block_s <= watch.take("busy") < block_s + 0.05
        assert watch.take("late") >= block_s
        time.sleep(block_s)  # noqa: ASYNC251 (a call that blocks is what is to be seen)
        await asyncio.sleep(0.001)
        assert watch.take("busy") < 0.05
        assert watch.take("late") >= block_s * 0.8
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    await asyncio.sleep(4 * INTERVAL_S)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before <= 8
    running.cancel()


async def test_watches_of_one_loop_end_in_any_order_and_leave_its_selector_as_it_was() -> None:
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = selector.select
    watches = [LoopWatch() for _ in range(3)]
    running = [asyncio.create_task(watch.run()) for watch in watches]
    await asyncio.sleep(0)
    for number in (0, 2, 1):
        running[number].cancel()
        await asyncio.gather(running[number], return_exceptions=True)
        compute(0.06)
        await asyncio.sleep(0.001)
        seen = [watch.take() >= 0.06 for watch in watches]
        assert seen == [not task.done() for task in running]
    assert selector.select == select


HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"

_served: list[bytes] = []


async def _echo(request: Request) -> Response:
    body = await request.body()
    _served.append(body)
    return JSONResponse({"size": len(body)})


async def _deaf(_request: Request) -> Response:
    """Return a response without reading the request body."""
    return JSONResponse({})


async def _nodelay(request: Request) -> Response:
    return JSONResponse({"nodelay": _socket_of(request).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)})


def _socket_of(request: Request) -> socket.socket:
    connection: socket.socket = request.receive.__self__.transport.get_extra_info("socket")  # type: ignore[attr-defined]
    return connection


ROUTES = [
    Route("/echo", _echo, methods=["POST"]),
    Route("/deaf", _deaf, methods=["POST"]),
    Route("/nodelay", _nodelay),
]
SHORT_S = 0.3
PATIENT_S = 20.0


@contextlib.asynccontextmanager
async def serving(timeout_s: float = SHORT_S) -> AsyncIterator[int]:
    _served.clear()
    timeouts = mock.patch.multiple(protocol, HEADER_TIMEOUT_S=timeout_s, BODY_TIMEOUT_S=timeout_s)
    with timeouts:
        async with web.serve(web.app({}, ROUTES), ServiceSettings()) as port:
            yield port


async def response_to(port: int, data: bytes, *, drip: bytes = b"", half: bool = False) -> bytes:
    """Return the server's response to `data`, followed by `drip` every 50 ms, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(data)
        while drip:
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(drip)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(PATIENT_S):
            answer = b""
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65_536):
                    answer += data
            return answer
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        writer.close()


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
async def test_small_answers_are_not_held_back(host: str, address: str) -> None:
    async with web.serve(web.app({}, ROUTES), ServiceSettings(host=host)) as port:
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(b"GET /nodelay HTTP/1.1\r\n" + HEADERS + b"\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"}"), PATIENT_S)
        writer.close()
    assert answer.endswith(b'{"nodelay":1}')


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "a byte now and then"])
@pytest.mark.parametrize("start", [b"", b"G", b"POST /echo HTTP/1.1\r\n" + HEADERS + b"X-Slow: "])
async def test_a_header_has_a_time_to_arrive_in(start: bytes, drip: bytes) -> None:
    async with serving() as port:
        answer = await response_to(port, start, drip=drip)
    if start or drip:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer.lower()
        assert b"the request's header took longer than 0.3 s" in answer
    else:
        assert answer == b""


async def test_the_second_header_of_a_connection_is_timed_too() -> None:
    first = b"POST /echo HTTP/1.1\r\n" + HEADERS + b"Content-Length: 2\r\n\r\nhi"
    async with serving() as port:
        answer = await response_to(port, first + b"POST /echo", drip=b"x")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'{"size":2}HTTP/1.1 408 ' in answer


@pytest.mark.parametrize("path", [b"/echo", b"/deaf"])
async def test_a_body_has_a_time_to_arrive_in(path: bytes) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\n" + HEADERS + b"Content-Length: 1000000000\r\n\r\n"
    async with serving() as port:
        began = time.monotonic()
        answer = await response_to(port, head, drip=b"x")
        assert time.monotonic() - began >= SHORT_S
    assert answer.startswith(b"HTTP/1.1 408 " if path == b"/echo" else b"HTTP/1.1 200 ")
    assert _served == []


async def test_a_connection_in_use_is_not_timed() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"POST /echo HTTP/1.1\r\n" + HEADERS + b"Content-Length: 2\r\n\r\nhi")
            assert (await asyncio.wait_for(reader.readuntil(b"}"), PATIENT_S)).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(2 * SHORT_S)  # idle: the time runs from the first byte of the next one
        writer.close()


HOST = HEADERS
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BAD = {
    "both lengths": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n", 400),
    "both, the other way": (b"POST /echo HTTP/1.1\r\n" + HOST + CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "both, for a header": (b"HEAD /echo HTTP/1.1\r\n" + HOST + CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi!", 400),
    "a list of lengths": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2, 3\r\n\r\nhi!", 400),
    "a signed length": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: +2\r\n\r\nhi", 400),
    "a negative length": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: -2\r\n\r\nhi", 400),
    "an unknown coding": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "two codings": (b"POST /echo HTTP/1.1\r\n" + HOST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n", 501),
    "chunks in HTTP/1.0": (b"POST /echo HTTP/1.0\r\n" + HOST + CHUNKED + b"\r\n0\r\n\r\n", 400),
    "a space before the colon": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length : 2\r\n\r\nhi", 400),
    "a bare CR": (b"POST /echo HTTP/1.1\r\n" + HOST + b"X: a\rContent-Length: 2\r\n\r\nhi", 400),
    "a NUL": (b"POST /echo HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n", 400),
    "two hosts": (b"POST /echo HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "no host": (b"POST /echo HTTP/1.1\r\n\r\n", 400),
    "a bad chunk": (b"POST /echo HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\nzz\r\nhi\r\n0\r\n\r\n", 400),
    "small chunks": (b"POST /echo HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n" + b"1\r\nx\r\n" * 2_000 + b"0\r\n\r\n", 400),
    "a large header": (b"POST /echo HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 20_000 + b"\r\n\r\n", 431),
    "many headers": (b"POST /echo HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 5_000 + b"\r\n", 431),
    "a long path": (b"POST /" + b"x" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_can_be_read_in_two_ways_is_refused_and_the_connection_closed(name: str) -> None:
    data, status = BAD[name]
    smuggled = b"POST /echo HTTP/1.1\r\n" + HEADERS + b"Content-Length: 8\r\n\r\nsmuggled"
    async with serving(timeout_s=30) as port:
        answer = await response_to(port, data + smuggled)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing behind it is taken for a request"
    assert b"smuggled" not in _served


async def test_a_header_without_an_end_is_refused_at_its_bound() -> None:
    async with serving(timeout_s=30) as port:
        answer = await response_to(port, b"POST /echo HTTP/1.1\r\nX: ", drip=b"x" * 4096)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"larger than 16384 bytes" in answer


async def test_equal_lengths_are_one_and_requests_in_one_piece_are_answered_in_order() -> None:
    first = b"POST /echo HTTP/1.1\r\n" + HEADERS + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi"
    last = b"POST /echo HTTP/1.1\r\nConnection: close\r\n" + HOST + CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n"
    async with serving(timeout_s=30) as port:
        answer = await response_to(port, first * 20 + last)
    assert answer.count(b"HTTP/1.1 200 ") == 21
    assert _served == [b"hi"] * 20 + [b"abc"]


async def test_a_body_in_many_chunks_of_some_size_is_read() -> None:
    chunks = b"40\r\n" + b"x" * 64 + b"\r\n"
    head = b"POST /echo HTTP/1.1\r\nConnection: close\r\n" + HOST + CHUNKED
    async with serving(timeout_s=30) as port:
        answer = await response_to(port, head + b"\r\n" + chunks * 2_000 + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    assert _served == [b"x" * 64 * 2_000]


async def test_a_bad_chunk_behind_an_answer_only_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(timeout_s=30) as port:
        head = b"POST /deaf HTTP/1.1\r\n" + HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await asyncio.wait_for(reader.readuntil(b"{}"), PATIENT_S)
        with contextlib.suppress(ConnectionError):
            writer.write(b"zz\r\nnot a chunk\r\n")
            assert await asyncio.wait_for(reader.read(), PATIENT_S) == b""
        writer.close()
    assert not [record for record in caplog.records if record.exc_info], "no traceback in the log"
