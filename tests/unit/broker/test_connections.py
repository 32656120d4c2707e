"""Tests of connections: sockets, request memory, and clients that are slow, faulty, too many or disconnected.

Such a client does not affect other clients and leaks no resources. Requests reserve memory in the order of their
arrival within a fixed limit, and a cancelled request returns its memory.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable

import pytest

from headrace_broker.broker import MemoryBudget
from headrace_broker.errors import Code
from headrace_broker.protocol.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
)
from headrace_broker.protocol.metadata import MetadataRequest, MetadataResponse, RequestHeader
from headrace_broker.server import listening_socket
from headrace_broker.wire import encode
from tests.support.presence import draw_seed
from tests.support.wire_client import WireClient, batch
from tests.unit.broker.conftest import Live, Run


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.01)


async def _closed(client: WireClient) -> None:
    with pytest.raises((EOFError, OSError)):
        await client.receive_raw()


def _nothing_held(live: Live) -> bool:
    return live.server.request_bytes == 0 and live.broker.fetch_memory.used == 0


def _fetch(
    topic: str, *, offset: int = 0, wait_ms: int = 0, min_bytes: int = 1, max_bytes: int = 1_000_000
) -> FetchRequest:
    partitions = (FetchPartition(0, -1, offset, -1, max_bytes),)
    return FetchRequest(-1, wait_ms, min_bytes, max_bytes, 0, 0, -1, (FetchTopic(topic, partitions),), (), "")


def _produce(topic: str, records: bytes) -> ProduceRequest:
    return ProduceRequest(None, -1, 1_000, (ProduceTopic(topic, (ProducePartition(0, records),)),))


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">i", -1),
        struct.pack(">i", 3) + b"abc",
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", 9 * 1024 * 1024),
        struct.pack(">ihhi", 8, 3, 4, 1),
        struct.pack(">ihhi", 8, 77, 0, 1),
        struct.pack(">ihhih", 10, 3, 3, 1, -1),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_nonsense_ends_its_connection_alone(live: Live, sent: bytes) -> None:
    topic = await live.create("t")
    async with live.client() as good, live.client() as bad:
        bad.writer.write(sent)
        await _closed(bad)
        assert live.broker.stats.malformed == 1
        assert (await good.produce(topic, batch()))[0] == Code.NONE
    await _until(lambda: live.broker.stats.connections == 0)
    assert _nothing_held(live)


async def test_more_connections_than_allowed_are_turned_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.CONNECTIONS_MAX", 2)
    async with run() as live:
        async with live.client() as first, live.client(), live.client() as third:
            await _closed(third)
            await first.ask(MetadataRequest((), False), MetadataResponse)
            assert live.broker.stats.connections_refused == 1
        await _until(lambda: live.broker.stats.connections == 0)
        async with live.client() as again:
            await again.ask(MetadataRequest((), False), MetadataResponse)


async def test_clients_without_a_login_do_not_keep_out_those_that_have_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody on the machine can open 512 connections, and a service that connects again would find none."""
    monkeypatch.setattr("headrace_broker.server.CONNECTIONS_MAX", 2)
    async with run(password="a-password-of-the-bus") as live, live.client() as oldest, live.client() as second:
        await _until(lambda: live.broker.stats.connections == 2)
        async with live.client():
            await _closed(oldest)
            await _until(lambda: live.broker.stats.connections == 2)
            assert live.broker.stats.connections_refused == 0, "the new connection was accepted"
            for connection in live.server._connections.values():
                connection._login.done = True
            async with live.client() as stranger:
                await _closed(stranger)
            assert live.broker.stats.connections_refused == 1
            assert live.broker.stats.connections == 2
            assert not second._reader.at_eof()


async def test_a_request_that_does_not_arrive_in_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.TRANSFER_TIMEOUT_S", 0.1)
    async with run() as live, live.client() as slow:
        slow.writer.write(struct.pack(">i", 1_000) + b"only this")
        await _until(lambda: live.server.request_bytes == 1_000)
        await _closed(slow)
        assert _nothing_held(live)


async def test_silent_connection_is_closed_before_its_login(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.TRANSFER_TIMEOUT_S", 0.1)
    async with run(password="a-password-of-the-bus") as live, live.client() as silent:
        await _closed(silent)
        assert _nothing_held(live)


async def test_a_connection_without_requests(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.CONNECTION_IDLE_S", 0.1)
    async with run() as live, live.client() as idle:
        await _closed(idle)


async def test_a_connection_that_waits_for_us_is_not_idle(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.CONNECTION_IDLE_S", 0.1)
    async with run() as live:
        topic = await live.create("t")
        async with live.client() as client:
            answer = await client.ask(_fetch(topic, wait_ms=400), FetchResponse)
            assert answer.topics[0].partitions[0].error_code == Code.NONE


async def test_a_client_that_does_not_take_its_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.TRANSFER_TIMEOUT_S", 0.2)
    async with run() as live:
        topic = await live.create("t")
        async with live.client() as client:
            for _ in range(8):
                await client.produce(topic, batch([(None, bytes(1_000_000))]))
            for _ in range(30):  # more than the socket's buffers take
                client.send(_fetch(topic, max_bytes=8_000_000))
            await _until(lambda: live.broker.fetch_memory.used > 0)
            await _until(lambda: live.broker.stats.connections == 0)
        assert _nothing_held(live)


async def test_a_client_that_leaves_while_its_fetch_waits(live: Live) -> None:
    topic = await live.create("t")
    async with live.client() as client:
        client.send(_fetch(topic, wait_ms=60_000))
        view = live.broker.catalog.topics[topic].partitions[0]
        await _until(lambda: len(view.readers) == 1)
    await _until(lambda: not view.readers)
    await _until(lambda: live.broker.stats.connections == 0)


async def test_what_a_client_sent_before_it_left_is_stored(live: Live) -> None:
    topic = await live.create("t")
    for _ in range(20):
        async with live.client() as client:
            client.send(_produce(topic, batch()))
            await client.writer.drain()
    view = live.broker.catalog.topics[topic].partitions[0]
    await _until(lambda: view.end == 20)
    async with live.client() as client:
        assert (await client.produce(topic, batch())) == (Code.NONE, 20)


async def test_many_requests_at_once_are_answered_in_order_within_bounds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_broker.server.CONNECTION_REQUESTS_MAX", 4)
    async with run() as live:
        topic = await live.create("t")
        async with live.client() as client:
            for _ in range(100):
                client.send(_produce(topic, batch()))
            offsets = [(await client.receive(ProduceResponse)).topics[0].partitions[0].base_offset for _ in range(100)]
        assert offsets == list(range(100))


async def test_concurrent_produces_share_commits(live: Live) -> None:
    topic = await live.create("t")
    before = live.broker.stats.commits
    async with live.client() as client:
        for _ in range(30):
            client.send(_produce(topic, batch()))
        for _ in range(30):
            await client.receive(ProduceResponse)
    assert live.broker.stats.commits - before < 15
    assert live.broker.stats.commit_operations >= 30


async def test_requests_wait_for_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.REQUESTS_BYTES_MAX", 300_000)
    async with run() as live:
        topic = await live.create("t")

        async def send_request() -> int:
            async with live.client() as client:
                code, _ = await client.produce(topic, batch([(None, bytes(200_000))]))
                return code

        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, live.server.request_bytes)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        assert await asyncio.gather(*[send_request() for _ in range(10)]) == [Code.NONE] * 10
        watcher.cancel()
        assert 200_000 < most <= 300_000


async def test_a_request_larger_than_all_memory_takes_the_whole_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_broker.server.REQUESTS_BYTES_MAX", 50_000)
    async with run() as live:
        topic = await live.create("t")
        async with live.client() as client:
            assert (await client.produce(topic, batch([(None, bytes(200_000))])))[0] == Code.NONE
            await _until(lambda: live.server.request_bytes == 0)


async def test_refusals_are_counted_by_code(live: Live) -> None:
    topic = await live.create("t")
    async with live.client() as client:
        await client.produce(topic, b"")
        await client.fetch(topic, 7)
    assert live.broker.stats.errors == {Code.INVALID_RECORD: 1, Code.OFFSET_OUT_OF_RANGE: 1}


async def test_fetch_waits_for_min_bytes(live: Live) -> None:
    topic = await live.create("t")
    size = len(batch([(None, bytes(100))]))
    async with live.client() as reader, live.client() as writer:
        reader.send(_fetch(topic, wait_ms=20_000, min_bytes=3 * size))
        answer = asyncio.create_task(reader.receive(FetchResponse))
        for _ in range(3):
            assert not answer.done()
            await writer.produce(topic, batch([(None, bytes(100))]))
        records = (await answer).topics[0].partitions[0].records
        assert records is not None
        assert len(records) == 3 * size
        response = await reader.ask(_fetch(topic, wait_ms=50, min_bytes=10**6), FetchResponse)
        assert response.topics[0].partitions[0].records is not None


async def test_fetch_of_a_topic_that_is_deleted_meanwhile(live: Live) -> None:
    from headrace_broker.protocol.topics import DeleteTopicsRequest, DeleteTopicsResponse

    topic = await live.create("t")
    async with live.client() as reader, live.client() as admin:
        reader.send(_fetch(topic, wait_ms=20_000))
        view = live.broker.catalog.topics[topic].partitions[0]
        await _until(lambda: len(view.readers) == 1)
        await admin.ask(DeleteTopicsRequest((topic,), 1_000), DeleteTopicsResponse)
        answer = await reader.receive(FetchResponse)
        assert answer.topics[0].partitions[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_bug_in_a_handler_costs_one_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await live.create("t")

    def broken(_topic: str, _number: int) -> None:
        raise ZeroDivisionError

    async with live.client() as unlucky, live.client() as other:
        with monkeypatch.context() as patch:
            patch.setattr(live.broker.catalog, "view", broken)
            unlucky.send(_produce(topic, batch()))
            await _closed(unlucky)
        assert live.broker.stats.handler_failures == 1
        assert (await other.produce(topic, batch()))[0] == Code.NONE


async def test_unacknowledged_and_refused_ends_the_connection(live: Live) -> None:
    """A producer that requests no acknowledgement learns of a refused batch only from the closed connection."""
    async with live.client() as client:
        topics = (ProduceTopic("missing", (ProducePartition(0, batch()),)),)
        client.send(ProduceRequest(None, 0, 1_000, topics))
        await _closed(client)


async def test_a_request_of_many_items_is_refused(live: Live) -> None:
    async with live.client() as client:
        frame = encode(RequestHeader(3, 4, 1, None))
        frame += struct.pack(">i", 1_000_000) + b"\0\0" * 1_000_000
        client.send_raw(bytes(frame))
        await _closed(client)


async def test_small_answers_are_not_held_back() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listening_socket("127.0.0.1", 0)
    server = await asyncio.start_server(accept, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 20) == 1
        writer.close()


async def test_who_comes_first_is_served_first() -> None:
    budget = MemoryBudget(10)
    assert await budget.acquire(8) == 8
    large, small = asyncio.create_task(budget.acquire(5)), asyncio.create_task(budget.acquire(1))
    await asyncio.sleep(0)
    assert not small.done()
    budget.release(8)
    assert await large == 5
    assert await small == 1
    assert budget.used == 6


async def test_more_than_everything_is_everything() -> None:
    budget = MemoryBudget(10)
    assert await budget.acquire(1_000) == 10
    budget.release(10)
    assert budget.used == 0


async def test_random_use_with_cancellations() -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    budget = MemoryBudget(100)

    async def use() -> None:
        granted = await budget.acquire(chance.randrange(1, 120))
        assert budget.used <= 100
        try:
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
        finally:
            budget.release(granted)

    tasks = [asyncio.create_task(use()) for _ in range(500)]
    for task in chance.sample(tasks, 200):
        await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.used == 0
    assert await budget.acquire(100) == 100
