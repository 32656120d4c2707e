"""Handlers of Fetch, which reads records or waits for new ones, and of ListOffsets.

ListOffsets returns the first offset, the last one, or the first one at or after a time.
"""

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
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    FetchedPartition,
    FetchedTopic,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    ListedPartition,
    ListedTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
)
from headrace_broker.reads import ReadRequest, ReadResult

FETCH_BYTES_MAX = 8 * 1024 * 1024
"""Largest response to one Fetch in bytes, unless a single batch is larger."""
_FETCH_WAIT_S = 60.0
"""Longest wait of a Fetch for new records, even if the client requests a longer one."""

_EMPTY = ReadResult(b"", None)


@dataclass(slots=True)
class _PartitionRead:
    """Read of one partition in a Fetch request: the request, the state of its log, and the result."""

    topic: str
    request: FetchPartition
    view: PartitionView | None = None
    code: Code = Code.UNKNOWN_TOPIC_OR_PARTITION
    start: int = -1
    end: int = -1
    stable: int = -1
    result: ReadResult = _EMPTY

    def response(self) -> FetchedPartition:
        """Return the partition's part of the response."""
        number, records = self.request.partition, self.result.records
        return FetchedPartition(number, self.code, self.end, self.stable, self.start, self.result.aborted, -1, records)


async def fetch(broker: Broker, call: RequestContext, request: FetchRequest) -> FetchResponse:
    """Handle Fetch: return available records, or wait up to the request's time for `min_bytes`. Errors return at once.

    Kafka's fetch sessions are not supported: with session id 0 clients send the complete request every time.
    """
    wait_s = min(request.max_wait_ms / 1000, _FETCH_WAIT_S)
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        parts = [_part(broker, topic.name, p) for topic in request.topics for p in topic.partitions]
        with _change_event(parts) as changed:
            size = await _read(broker, call, request, parts)
            failed = [part.code for part in parts if part.code is not Code.NONE]
            if failed or size >= request.min_bytes or not await _wait(changed, deadline):
                broker.stats.fetched_bytes += size
                broker.stats.errors.update(failed)
                return _response(parts)
        broker.fetch_memory.release(call.response_bytes)
        call.response_bytes = 0


def _part(broker: Broker, topic: str, partition: FetchPartition) -> _PartitionRead:
    view = broker.catalog.view(topic, partition.partition)
    if view is None:
        return _PartitionRead(topic, partition)
    is_inside = view.start <= partition.fetch_offset <= view.end
    code = Code.NONE if is_inside else Code.OFFSET_OUT_OF_RANGE
    return _PartitionRead(topic, partition, view, code, view.start, view.end, view.stable)


@contextlib.contextmanager
def _change_event(parts: Sequence[_PartitionRead]) -> Iterator[asyncio.Event]:
    """Context with an event that is set when one of the partitions changes or is deleted."""
    changed = asyncio.Event()
    views = [part.view for part in parts if part.view]
    for view in views:
        view.readers.add(changed)
    try:
        yield changed
    finally:
        for view in views:
            view.readers.discard(changed)


async def _wait(event: asyncio.Event, deadline: float) -> bool:
    """Wait for the event. Return False if the deadline passes first."""
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _read(broker: Broker, call: RequestContext, request: FetchRequest, parts: Sequence[_PartitionRead]) -> int:
    """Read available records into `parts`. Return their size in bytes, which `call` has reserved."""
    committed = request.isolation_level == READ_COMMITTED
    reading: list[tuple[_PartitionRead, ReadRequest]] = []
    for part in parts:
        before = part.stable if committed else part.end
        if part.view and part.code is Code.NONE and part.request.fetch_offset < before:
            read = ReadRequest(part.view.id, part.request.fetch_offset, before, part.request.max_bytes, committed)
            reading.append((part, read))
    if not reading:
        return 0
    bytes_max = max(min(request.max_bytes, FETCH_BYTES_MAX), 1)
    call.response_bytes = await broker.fetch_memory.acquire(bytes_max)
    try:
        results = await broker.readers.run(reads.batches, [read for _, read in reading], bytes_max)
    except Rejected as error:
        for part, _ in reading:
            part.code = error.code
        return 0
    for (part, _), result in zip(reading, results, strict=True):
        part.result = result
    size = sum(len(result.records) for result in results)
    spare = max(call.response_bytes - size, 0)  # a single batch may exceed `bytes_max`
    broker.fetch_memory.release(spare)
    call.response_bytes -= spare
    return size


def _response(parts: Sequence[_PartitionRead]) -> FetchResponse:
    by_topic = groupby(parts, key=lambda part: part.topic)
    topics = tuple(FetchedTopic(name, tuple(part.response() for part in group)) for name, group in by_topic)
    return FetchResponse(0, Code.NONE, 0, topics)


async def list_offsets(broker: Broker, call: RequestContext, request: ListOffsetsRequest) -> ListOffsetsResponse:
    """Handle ListOffsets: look up the first, the last, or the offset at a time of each partition."""
    committed = request.isolation_level == READ_COMMITTED
    topics = []
    for topic in request.topics:
        partitions = [await _offset(broker, topic.name, partition, committed) for partition in topic.partitions]
        topics.append(ListedTopic(topic.name, tuple(partitions)))
    return ListOffsetsResponse(0, tuple(topics))


async def _offset(broker: Broker, topic: str, request: ListOffsetsPartition, committed: bool) -> ListedPartition:
    try:
        view = broker.view(topic, request.partition)
        end = view.stable if committed else view.end
        if request.timestamp == LATEST:
            offset, timestamp = end, -1
        elif request.timestamp == EARLIEST:
            offset, timestamp = view.start, -1
        elif request.timestamp < 0:
            raise Rejected(Code.INVALID_REQUEST, f"timestamp {request.timestamp} is not supported")
        else:
            offset, timestamp = await broker.readers.run(
                reads.offset_at_time, view.id, view.start, end, request.timestamp
            )
    except Rejected as error:
        broker.stats.errors[error.code] += 1
        return ListedPartition(request.partition, error.code, -1, -1)
    return ListedPartition(request.partition, Code.NONE, timestamp, offset)
