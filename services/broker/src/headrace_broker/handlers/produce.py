"""Handlers of Produce and InitProducerId."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import NamedTuple

from headrace_broker.batch import NO_PRODUCER, RecordBatch, parse_produced, records
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.log import AppendResult
from headrace_broker.protocol.fetch import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProducedPartition,
    ProducedTopic,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
)
from headrace_broker.transactions import Owner

_TRANSACTION_TIMEOUT_MAX_S = 900.0
"""Longest timeout of a transaction that a producer may choose, as in Apache Kafka."""
_TIMESTAMP_AHEAD_MAX_S = 3600.0
"""Maximum time by which a record's timestamp may be in the future, because retention uses it."""

_WRITTEN_PER_BYTE = 2
"""Bytes on the disk per byte of a record, which is written to the write-ahead log and then to the file."""
_FENCED_SINCE = 4
"""First version of InitProducerId with the error PRODUCER_FENCED."""


class _Item(NamedTuple):
    """The batch of one partition in a request."""

    topic: str
    number: int
    partition_id: int
    batch: RecordBatch
    keyed: bool
    """Whether all records need a key, because the topic is compacted."""


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
            ProducedTopic(name, tuple(_response(number, results[name, number]) for _, number in keys))
            for name, keys in groupby(ordered, key=lambda key: key[0])
        ),
        throttle_time_ms=0,
    )


async def init_producer_id(
    broker: Broker, call: RequestContext, request: InitProducerIdRequest
) -> InitProducerIdResponse:
    """Handle InitProducerId: assign a producer id, or let the caller take over its transactional id."""
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
    """Append the batches of a request, each with its own result. Runs in the writer's thread."""
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


def _response(number: int, result: AppendResult | Rejected) -> ProducedPartition:
    if isinstance(result, Rejected):
        return ProducedPartition(number, result.code, -1, -1, -1)
    return ProducedPartition(number, Code.NONE, result.base_offset, -1, result.log_start)
