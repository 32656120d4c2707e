"""Messages for reading and writing records: Fetch 11, ListOffsets 2, Produce 7, and InitProducerId 0 to 4."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Int8, Int16, Int32, Int64, NullableString, Records, Since, String

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2


class FetchPartition(NamedTuple):
    """Partition and offset from which to read. `current_leader_epoch` and `log_start_offset` are for other brokers and
    unused here."""

    partition: Int32
    current_leader_epoch: Int32
    fetch_offset: Int64
    log_start_offset: Int64
    max_bytes: Int32


class FetchTopic(NamedTuple):
    """Partitions of a topic from which to read."""

    name: String
    partitions: tuple[FetchPartition, ...]


class ForgottenTopic(NamedTuple):
    """Topic to remove from a fetch session. It is ignored, because sessions are not supported."""

    name: String
    partitions: tuple[Int32, ...]


class FetchRequest(NamedTuple):
    """Fetch request (API key 1). The broker waits at most `max_wait_ms` until there are `min_bytes`. `isolation_level`
    1 is read_committed."""

    replica_id: Int32
    max_wait_ms: Int32
    min_bytes: Int32
    max_bytes: Int32
    isolation_level: Int8
    session_id: Int32
    session_epoch: Int32
    topics: tuple[FetchTopic, ...]
    forgotten: tuple[ForgottenTopic, ...]
    rack_id: String


class AbortedTransaction(NamedTuple):
    """Aborted transaction. A consumer skips the producer's records from `first_offset` to the producer's next abort
    marker."""

    producer_id: Int64
    first_offset: Int64


class FetchedPartition(NamedTuple):
    """Records that were read from a partition: complete batches, of which the first may begin before the requested
    offset."""

    partition: Int32
    error_code: Int16
    high_watermark: Int64
    last_stable_offset: Int64
    log_start_offset: Int64
    aborted: tuple[AbortedTransaction, ...] | None
    preferred_read_replica: Int32
    records: Records


class FetchedTopic(NamedTuple):
    """Records that were read from the partitions of a topic."""

    name: String
    partitions: tuple[FetchedPartition, ...]


class FetchResponse(NamedTuple):
    """Fetch response (API key 1). `session_id` 0 tells the client that there is no fetch session."""

    throttle_time_ms: Int32
    error_code: Int16
    session_id: Int32
    topics: tuple[FetchedTopic, ...]


class ListOffsetsPartition(NamedTuple):
    """Partition whose offset is requested. `timestamp` is a time in milliseconds, or `LATEST` or `EARLIEST`."""

    partition: Int32
    timestamp: Int64


class ListOffsetsTopic(NamedTuple):
    """Partitions of a topic whose offsets are requested."""

    name: String
    partitions: tuple[ListOffsetsPartition, ...]


class ListOffsetsRequest(NamedTuple):
    """ListOffsets request (API key 2): partitions, each with a time or with `LATEST` or `EARLIEST`."""

    replica_id: Int32
    isolation_level: Int8
    topics: tuple[ListOffsetsTopic, ...]


class ListedPartition(NamedTuple):
    """Offset of one partition: of its first record at or after the requested time, or -1 if there is none."""

    partition: Int32
    error_code: Int16
    timestamp: Int64
    offset: Int64


class ListedTopic(NamedTuple):
    """Offsets of the partitions of a topic."""

    name: String
    partitions: tuple[ListedPartition, ...]


class ListOffsetsResponse(NamedTuple):
    """ListOffsets response (API key 2): the requested offsets."""

    throttle_time_ms: Int32
    topics: tuple[ListedTopic, ...]


class ProducePartition(NamedTuple):
    """Record batch to store in a partition."""

    partition: Int32
    records: Records


class ProduceTopic(NamedTuple):
    """Record batches to store in the partitions of a topic."""

    name: String
    partitions: tuple[ProducePartition, ...]


class ProduceRequest(NamedTuple):
    """Produce request (API key 0). With `acks` 0 the client gets no response; 1 and -1 have the same effect here."""

    transactional_id: NullableString
    acks: Int16
    timeout_ms: Int32
    topics: tuple[ProduceTopic, ...]


class ProducedPartition(NamedTuple):
    """Result of storing a batch. `base_offset` is the offset of its first record, or -1 if the batch was refused."""

    partition: Int32
    error_code: Int16
    base_offset: Int64
    log_append_time_ms: Int64
    log_start_offset: Int64


class ProducedTopic(NamedTuple):
    """Results for the partitions of a topic."""

    name: String
    partitions: tuple[ProducedPartition, ...]


class ProduceResponse(NamedTuple):
    """Produce response (API key 0), sent once all batches are durable."""

    topics: tuple[ProducedTopic, ...]
    throttle_time_ms: Int32


class InitProducerIdRequest(NamedTuple):
    """InitProducerId request (API key 22) for a producer id, or for the ownership of a transactional id.

    The client becomes the owner of the transactional id, and the previous owner is fenced. A client that is already the
    owner sends its producer id and epoch, and gets the next epoch (KIP-360).
    """

    transactional_id: NullableString
    transaction_timeout_ms: Int32
    producer_id: Annotated[Int64, Since(3, -1)] = -1
    producer_epoch: Annotated[Int16, Since(3, -1)] = -1


class InitProducerIdResponse(NamedTuple):
    """InitProducerId response (API key 22): the producer id and the epoch that the client must send with its
    batches."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64
    producer_epoch: Int16
