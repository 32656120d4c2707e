"""Handlers that read and write records: Fetch, ListOffsets, Produce and InitProducerId."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from headrace_broker import reads
from headrace_broker.batch import NO_PRODUCER, RecordBatch, parse_produced, records
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.log import AppendResult
from headrace_broker.protocol.fetch import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    FetchedPartition,
    FetchedTopic,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListedPartition,
    ListedTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ProducedPartition,
    ProducedTopic,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
)
from headrace_broker.reads import ReadRequest, ReadResult
from headrace_broker.topics import PartitionView
from headrace_broker.transactions import Owner

FETCH_BYTES_MAX = 8 * 1024 * 1024
"""Maximum bytes of one Fetch response, unless a single batch is larger."""
_FETCH_WAIT_S = 60.0
"""Maximum seconds for which a Fetch waits for new records, even if the client requests a longer wait."""

_EMPTY = ReadResult(b"", None)


@dataclass(slots=True)
class _PartitionRead:
    """One partition of a Fetch request: the request, the state of its log, and what was read."""

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
    """Handle Fetch: return available records, or wait up to `max_wait_ms` until there are `min_bytes`. An error is
    returned at once.

    Kafka's fetch sessions are not supported. The response has session id 0, so clients send the complete request each
    time.
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
    """Yield an event that is set when one of the partitions gets new records or is deleted."""
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
    """Read available records into `parts`. Return their size in bytes, which is reserved in `call.response_bytes`."""
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
        results = await broker.readers.run(reads.read_batches, [read for _, read in reading], bytes_max)
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
    """Handle ListOffsets: return, for each partition, its first offset, its end, or the first offset at or after a
    time."""
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


_TRANSACTION_TIMEOUT_MAX_S = 900.0
"""Longest timeout of a transaction that a producer may choose, as in Apache Kafka."""
_TIMESTAMP_AHEAD_MAX_S = 3600.0
"""Maximum seconds by which a record's timestamp may be in the future. Otherwise retention would not delete the record
in time."""

_WRITTEN_PER_BYTE = 2
"""Bytes written to the disk per byte of a record, which is written to the write-ahead log and later to the file."""
_FENCED_SINCE = 4
"""First version of InitProducerId that has the error PRODUCER_FENCED."""


class _Item(NamedTuple):
    """Batch of one partition in a Produce request, after its checks."""

    topic: str
    number: int
    partition_id: int
    batch: RecordBatch
    keyed: bool
    """Whether each record must have a key, because the topic is compacted."""


async def produce(broker: Broker, call: RequestContext, request: ProduceRequest) -> ProduceResponse | None:
    """Handle Produce: store the batches of all partitions in one commit. With acks 0 the client gets no response."""
    results: dict[tuple[str, int], AppendResult | Rejected] = {}
    items: list[_Item] = []
    for topic in request.topics:
        for partition in topic.partitions:
            try:
                items.append(_checked_item(broker, request, topic.name, partition))
            except Rejected as error:
                results[topic.name, partition.partition] = error
    if items:
        try:
            stored = await broker.writer.submit(partial(_store, broker, request.transactional_id, items))
        except Rejected as error:
            stored = [error] * len(items)
        results.update({(item.topic, item.number): result for item, result in zip(items, stored, strict=True)})
    refused = [result for result in results.values() if isinstance(result, Rejected)]
    broker.stats.errors.update(error.code for error in refused)
    if request.acks == 0:
        if refused:
            raise Malformed(f"a batch with acks 0 was refused: {refused[0]}")
        return None
    ordered = [(topic.name, p.partition) for topic in request.topics for p in topic.partitions]
    return ProduceResponse(
        tuple(
            ProducedTopic(name, tuple(_produced_partition(number, results[name, number]) for _, number in keys))
            for name, keys in groupby(ordered, key=lambda key: key[0])
        ),
        throttle_time_ms=0,
    )


async def init_producer_id(
    broker: Broker, call: RequestContext, request: InitProducerIdRequest
) -> InitProducerIdResponse:
    """Handle InitProducerId: return a new producer id, or make the client the owner of its transactional id."""
    name, timeout_ms = request.transactional_id, request.transaction_timeout_ms
    if name is None:
        producer_id = await broker.writer.submit(broker.transactions.new_producer_id)
        return InitProducerIdResponse(0, Code.NONE, producer_id, 0)
    if not name:
        raise Rejected(Code.INVALID_REQUEST, "the transactional id must not be empty")
    if not 0 < timeout_ms <= _TRANSACTION_TIMEOUT_MAX_S * 1000:
        raise Rejected(Code.INVALID_TRANSACTION_TIMEOUT, f"the timeout {timeout_ms} ms is outside of its range")
    owner = Owner(request.producer_id, request.producer_epoch) if request.producer_id != NO_PRODUCER else None
    begin = partial(broker.transactions.begin_session, name, timeout_ms, broker.now_ms(), owner)
    try:
        return InitProducerIdResponse(0, Code.NONE, *await broker.writer.submit(begin))
    except Rejected as error:
        if error.code is Code.PRODUCER_FENCED and call.version < _FENCED_SINCE:
            raise Rejected(Code.INVALID_PRODUCER_EPOCH, str(error)) from error
        raise


def _checked_item(broker: Broker, request: ProduceRequest, topic: str, partition: ProducePartition) -> _Item:
    if request.acks not in (-1, 0, 1):
        raise Rejected(Code.INVALID_REQUIRED_ACKS, f"acks = {request.acks}: must be -1, 0 or 1")
    view = broker.view(topic, partition.partition)
    config = broker.catalog.topics[topic].config
    raw = partition.records or b""
    if len(raw) > config.max_message_bytes:
        raise Rejected(Code.MESSAGE_TOO_LARGE, f"{len(raw)} bytes, max.message.bytes is {config.max_message_bytes}")
    batch = parse_produced(raw)
    if batch.max_timestamp > broker.now_ms() + _TIMESTAMP_AHEAD_MAX_S * 1000:
        raise Rejected(Code.INVALID_TIMESTAMP, f"{batch.max_timestamp} ms is too far in the future")
    guard = broker.disk_of_tables if config.compacts else broker.disk
    shortage = guard.shortage(_WRITTEN_PER_BYTE * len(raw)) if guard is not None else None
    if shortage is not None:
        raise Rejected(Code.STORAGE_ERROR, shortage)
    broker.stats.produced_bytes += len(raw)
    return _Item(topic, partition.partition, view.id, batch, config.compacts)


def _store(broker: Broker, transactional_id: str | None, items: list[_Item]) -> list[AppendResult | Rejected]:
    """Append the batches of a request. Return a result or an exception for each. Runs in the writer's thread."""
    now_ms = broker.now_ms()
    results: list[AppendResult | Rejected] = []
    for item in items:
        batch = item.batch
        try:
            if item.keyed:
                _check_keys(batch)
            if batch.transactional:
                broker.transactions.check_append(
                    transactional_id, item.partition_id, batch.producer_id, batch.producer_epoch
                )
            results.append(broker.log.append(item.partition_id, batch, now_ms))
        except Rejected as error:
            results.append(error)
    return results


def _check_keys(batch: RecordBatch) -> None:
    try:
        if any(record.key is None for record in records(batch)):
            raise Rejected(Code.INVALID_RECORD, "records of a compacted topic need a key")
    except Malformed as error:
        raise Rejected(Code.INVALID_RECORD, str(error)) from error


def _produced_partition(number: int, result: AppendResult | Rejected) -> ProducedPartition:
    if isinstance(result, Rejected):
        return ProducedPartition(number, result.code, -1, -1, -1)
    return ProducedPartition(number, Code.NONE, result.base_offset, -1, result.log_start)
