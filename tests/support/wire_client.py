"""Kafka clients of tests: one that sends exact bytes, and context managers for aiokafka's clients."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from headrace.producing import client_options
from headrace_broker.batch import parse
from headrace_broker.dispatch import APIS
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
from headrace_broker.protocol.metadata import RequestHeader
from headrace_broker.wire import PLAIN, WireReader, decode, encode, skip_tagged

M = TypeVar("M", bound=NamedTuple)
READY_TIMEOUT_S = 20.0
NOT_LEADER = 6
_LOADING = (14, 15, 16)
_API_OF = {api.request: api for api in APIS}


class WireClient:
    """One connection. `ask` sends a request and reads its answer; `send` and `receive` do one of the two."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._correlation = 0
        self._form = PLAIN

    async def ask(self, request: NamedTuple, answer: type[M], version: int | None = None) -> M:
        self.send(request, version)
        return await self.receive(answer)

    async def ask_ready(self, request: NamedTuple, answer: type[M]) -> M:
        """Send a request, and repeat it while a freshly started Kafka answers that it is loading (`error_code`)."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                response = await self.ask(request, answer)
                if response.error_code not in _LOADING:  # type: ignore[attr-defined]
                    return response
                await asyncio.sleep(0.1)

    def send(self, request: NamedTuple, version: int | None = None) -> None:
        """Send a request in `version`, by default the newest that the broker supports."""
        api = _API_OF[type(request)]
        self._correlation += 1
        self._form = api.form(api.version if version is None else version)
        frame = encode(RequestHeader(api.key, self._form.version, self._correlation, "wire-test"))
        if self._form.flexible:
            frame.append(0)  # no tagged fields
        encode(request, frame, self._form)
        self.send_raw(bytes(frame))

    def send_raw(self, frame: bytes) -> None:
        self.writer.write(struct.pack(">i", len(frame)) + frame)

    async def receive(self, answer: type[M]) -> M:
        """Return the next answer, in the version of the last request."""
        source = WireReader(memoryview(await self.receive_raw())[4:])
        if self._form.flexible:
            skip_tagged(source)
        return decode(answer, source, self._form)

    async def receive_raw(self) -> bytes:
        """Return the bytes of the next answer, beginning with the correlation id. Raises `EOFError` on a closed
        connection.
        """
        async with asyncio.timeout(20):
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            return await self._reader.readexactly(size)

    async def produce(
        self, topic: str, records: bytes, *, acks: int = -1, partition: int = 0, transactional_id: str | None = None
    ) -> tuple[int, int]:
        """Produce records. Return the error code and the base offset."""
        await self._led(topic, partition)
        topics = (ProduceTopic(topic, (ProducePartition(partition, records),)),)
        response = await self.ask(ProduceRequest(transactional_id, acks, 10_000, topics), ProduceResponse)
        answer = response.topics[0].partitions[0]
        return answer.error_code, answer.base_offset

    async def _led(self, topic: str, partition: int) -> None:
        """Wait until a new partition has a leader: Kafka announces a topic shortly before it serves it."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                code, _ = await self.fetch(topic, partition=partition)
                if code != NOT_LEADER:
                    return
                await asyncio.sleep(0.05)

    async def fetch(self, topic: str, offset: int = 0, *, isolation: int = 0, partition: int = 0) -> tuple[int, bytes]:
        """Return the error code and the available records."""
        topics = (FetchTopic(topic, (FetchPartition(partition, -1, offset, -1, 1_000_000),)),)
        request = FetchRequest(-1, 0, 0, 10_000_000, isolation, 0, -1, topics, (), "")
        response = await self.ask(request, FetchResponse)
        answer = response.topics[0].partitions[0]
        return answer.error_code, bytes(answer.records or b"")

    async def base_offsets(self, topic: str) -> list[int]:
        """Return the base offsets of the batches in partition 0, from its start."""
        _, data = await self.fetch(topic)
        offsets = []
        while data:
            size = 12 + struct.unpack_from(">i", data, 8)[0]
            offsets.append(parse(data[:size]).base_offset)
            data = data[size:]
        return offsets


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[WireClient]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield WireClient(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


Entry = tuple[bytes | None, bytes | None]
_CRC_AT, _CHECKED_FROM = 17, 21
_AT = {
    "base_offset": (0, ">q"), "length": (8, ">i"), "magic": (16, ">b"), "attributes": (21, ">h"),
    "last_offset_delta": (23, ">i"), "base_timestamp": (27, ">q"), "max_timestamp": (35, ">q"),
    "producer_id": (43, ">q"), "epoch": (51, ">h"), "sequence": (53, ">i"), "count": (57, ">i"),
}  # fmt: skip


def now_ms() -> int:
    return int(time.time() * 1000)


def batch(
    entries: Iterable[Entry] = ((b"k", b"v"),),
    *,
    producer_id: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    compression: int = 0,
    transactional: bool = False,
    timestamps: Sequence[int] | None = None,
    **header: int,
) -> bytes:
    """Return a record batch of key and value pairs.

    `header` overwrites header fields; the checksum is still correct.
    """
    pairs = list(entries)
    times = timestamps or [now_ms()] * len(pairs)
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=compression, is_transactional=transactional, producer_id=producer_id,
        producer_epoch=epoch, base_sequence=sequence, batch_size=64 * 1024 * 1024,
    )  # fmt: skip
    for offset, ((key, value), timestamp) in enumerate(zip(pairs, times, strict=True)):
        builder.append(offset, timestamp, key, value, [])
    return patched(bytes(builder.build()), **header)


def patched(raw: bytes, **header: int) -> bytes:
    """Return the batch with overwritten header fields and a correct checksum."""
    data = bytearray(raw)
    for name, value in header.items():
        at, layout = _AT[name]
        struct.pack_into(layout, data, at, value)
    struct.pack_into(">I", data, _CRC_AT, calc_crc32c(bytes(data[_CHECKED_FROM:])))
    return bytes(data)


def corrupted(raw: bytes) -> bytes:
    """Return the batch with its last byte changed and its old checksum."""
    return raw[:-1] + bytes([raw[-1] ^ 0xFF])


READ_TIMEOUT_S = 20.0
START_MS = int(time.time() * 1000) - 3_600_000
"""Time of the first record of a test: recent, because a round of retention may come at any moment."""


@contextlib.asynccontextmanager
async def producing(bus: str, **options: object) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(**client_options(bus), **{"enable_idempotence": True, **options})
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@contextlib.asynccontextmanager
async def consuming(bus: str, *topics: str, **options: object) -> AsyncIterator[AIOKafkaConsumer]:
    defaults: dict[str, object] = {
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "heartbeat_interval_ms": 300,
        "fetch_max_wait_ms": 200,
        "retry_backoff_ms": 50,
    }
    consumer = AIOKafkaConsumer(*topics, **client_options(bus), **{**defaults, **options})
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


@contextlib.asynccontextmanager
async def administering(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(**client_options(bus))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def create(admin: AIOKafkaAdminClient, name: str, partitions: int, config: dict[str, str] | None = None) -> None:
    """Create a topic, and return once it can be used."""
    response = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=config or {})])
    assert [code for _, code, *_ in response.topic_errors] == [0]
    await eventually(lambda: _is_listed(admin, name))


async def _is_listed(admin: AIOKafkaAdminClient, topic: str) -> bool:
    """Return whether the metadata lists `topic`, which may be a little later than the response to its creation."""
    (described,) = await admin.describe_topics([topic])
    return described["error_code"] == 0 and all(p["leader"] >= 0 for p in described["partitions"])


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until `holds` returns True, with ten calls a second. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.1)


async def take(consumer: AIOKafkaConsumer, count: int) -> list[ConsumerRecord]:
    """Return exactly the next `count` records. Raises `TimeoutError` if fewer arrive."""
    async with asyncio.timeout(READ_TIMEOUT_S):
        return [await consumer.getone() for _ in range(count)]


async def everything(bus: str, topic: str, **options: object) -> list[ConsumerRecord]:
    """Return all records of partition 0 from its start to its present end.

    The end is that of all records, because Kafka answers EndTxn a little before a reader of committed records may read
    the last ones.
    """
    partition = TopicPartition(topic, 0)
    async with consuming(bus, **{**options, "isolation_level": "read_uncommitted"}) as reader:
        end = (await reader.end_offsets([partition]))[partition]
    async with consuming(bus, **options) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        records: list[ConsumerRecord] = []
        async with asyncio.timeout(READ_TIMEOUT_S):
            while await consumer.position(partition) < end:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    records += batch
        return [record for record in records if record.offset < end]
