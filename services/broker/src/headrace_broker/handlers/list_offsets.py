"""ListOffsets: the first, the last, or the first at a time."""

from __future__ import annotations

from headrace_broker import reads
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.fetch import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    ListedPartition,
    ListedTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
)


async def list_offsets(broker: Broker, call: RequestContext, request: ListOffsetsRequest) -> ListOffsetsResponse:
    committed = request.isolation_level == READ_COMMITTED
    topics = []
    for topic in request.topics:
        found = [await _offset(broker, topic.name, partition, committed) for partition in topic.partitions]
        topics.append(ListedTopic(topic.name, tuple(found)))
    return ListOffsetsResponse(0, tuple(topics))


async def _offset(broker: Broker, topic: str, asked: ListOffsetsPartition, committed: bool) -> ListedPartition:
    try:
        view = broker.view(topic, asked.partition)
        end = view.stable if committed else view.end
        if asked.timestamp == LATEST:
            offset, timestamp = end, -1
        elif asked.timestamp == EARLIEST:
            offset, timestamp = view.start, -1
        elif asked.timestamp < 0:
            raise Rejected(Code.INVALID_REQUEST, f"timestamp {asked.timestamp}")
        else:
            offset, timestamp = await broker.readers.run(
                reads.offset_at_time, view.id, view.start, end, asked.timestamp
            )
    except Rejected as error:
        broker.stats.errors[error.code] += 1
        return ListedPartition(asked.partition, error.code, -1, -1)
    return ListedPartition(asked.partition, Code.NONE, timestamp, offset)
