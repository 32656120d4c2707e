"""Handler of ListOffsets: the first offset, the last one, or the first one at or after a time."""

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
    """Handle ListOffsets."""
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
