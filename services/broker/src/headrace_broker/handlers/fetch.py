"""Fetch: read what is there, or wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from headrace_broker import reads
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.catalog import PartitionView
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.fetch import (
    READ_COMMITTED,
    FetchedPartition,
    FetchedTopic,
    FetchPartition,
    FetchRequest,
    FetchResponse,
)
from headrace_broker.reads import ReadRequest, ReadResult

_NOTHING = ReadResult(b"", None)


@dataclass(slots=True)
class _Part:
    """One partition of the request: where its log was when we looked, and what was read."""

    topic: str
    request: FetchPartition
    view: PartitionView | None = None
    code: Code = Code.UNKNOWN_TOPIC_OR_PARTITION
    start: int = -1
    end: int = -1
    stable: int = -1
    got: ReadResult = _NOTHING

    def answer(self) -> FetchedPartition:
        number, records = self.request.partition, self.got.records
        return FetchedPartition(number, self.code, self.end, self.stable, self.start, self.got.aborted, -1, records)


async def fetch(broker: Broker, call: RequestContext, request: FetchRequest) -> FetchResponse:
    """Answer at once with an error or `min_bytes`, else when they are there or the wait is over.

    Kafka's fetch sessions are not used: session id 0 tells clients to send the whole request every time.
    """
    wait_s = min(request.max_wait_ms / 1000, broker.settings.fetch_wait_s)
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        parts = [_look(broker, topic.name, p) for topic in request.topics for p in topic.partitions]
        with _watched(parts) as moved:
            size = await _read(broker, call, request, parts)
            failed = [part.code for part in parts if part.code is not Code.NONE]
            if failed or size >= request.min_bytes or not await _happens(moved, deadline):
                broker.stats.fetched_bytes += size
                broker.stats.errors.update(failed)
                return _response(parts)
        broker.fetch_memory.give(call.response_bytes)
        call.response_bytes = 0


def _look(broker: Broker, topic: str, partition: FetchPartition) -> _Part:
    view = broker.catalog.view(topic, partition.partition)
    if view is None:
        return _Part(topic, partition)
    inside = view.start <= partition.fetch_offset <= view.end
    code = Code.NONE if inside else Code.OFFSET_OUT_OF_RANGE
    return _Part(topic, partition, view, code, view.start, view.end, view.stable)


@contextlib.contextmanager
def _watched(parts: Sequence[_Part]) -> Iterator[asyncio.Event]:
    """An event that is set when one of the partitions moves or is deleted."""
    moved = asyncio.Event()
    views = [part.view for part in parts if part.view]
    for view in views:
        view.readers.add(moved)
    try:
        yield moved
    finally:
        for view in views:
            view.readers.discard(moved)


async def _happens(event: asyncio.Event, deadline: float) -> bool:
    """Wait for the event; False when the deadline came first."""
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _read(broker: Broker, call: RequestContext, request: FetchRequest, parts: Sequence[_Part]) -> int:
    """Fill in what there is. Returns its size, for which `call` holds the memory."""
    committed = request.isolation_level == READ_COMMITTED
    wants: list[tuple[_Part, ReadRequest]] = []
    for part in parts:
        before = part.stable if committed else part.end
        if part.view and part.code is Code.NONE and part.request.fetch_offset < before:
            want = ReadRequest(part.view.id, part.request.fetch_offset, before, part.request.max_bytes, committed)
            wants.append((part, want))
    if not wants:
        return 0
    bytes_max = max(min(request.max_bytes, broker.settings.fetch_bytes_max), 1)
    call.response_bytes = await broker.fetch_memory.take(bytes_max)
    try:
        got = await broker.readers.run(reads.batches, [want for _, want in wants], bytes_max)
    except Rejected as error:
        for part, _ in wants:
            part.code = error.code
        return 0
    for (part, _), found in zip(wants, got, strict=True):
        part.got = found
    size = sum(len(found.records) for found in got)
    spare = max(call.response_bytes - size, 0)  # a lone batch may be larger than what was asked for
    broker.fetch_memory.give(spare)
    call.response_bytes -= spare
    return size


def _response(parts: Sequence[_Part]) -> FetchResponse:
    by_topic = groupby(parts, key=lambda part: part.topic)
    topics = tuple(FetchedTopic(name, tuple(part.answer() for part in found)) for name, found in by_topic)
    return FetchResponse(0, Code.NONE, 0, topics)
