"""Reading and writing of records: Fetch 11, ListOffsets 2, Produce 7, and InitProducerId 0 to 4."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Int8, Int16, Int32, Int64, NullableString, Records, Since, String

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2


class FetchPartition(NamedTuple):
    """Partition and offset to read from. `current_leader_epoch` and `log_start_offset` are for brokers and unused."""

    partition: Int32
    current_leader_epoch: Int32
    fetch_offset: Int64
    log_start_offset: Int64
    max_bytes: Int32


class FetchTopic(NamedTuple):
    """The partitions of a topic to read."""

    name: String
    partitions: tuple[FetchPartition, ...]


class ForgottenTopic(NamedTuple):
    """Topic to remove from a fetch session. Sessions are not supported."""

    name: String
    partitions: tuple[Int32, ...]


class FetchRequest(NamedTuple):
    """Fetch request (API key 1). Wait at most `max_wait_ms` for `min_bytes`; `isolation_level` 1 is read_committed."""

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
    """Aborted transaction. Consumers skip the producer's records from `first_offset` to its next abort marker."""

    producer_id: Int64
    first_offset: Int64


class FetchedPartition(NamedTuple):
    """Records of a partition: complete batches, of which the first one may begin before the requested offset."""

    partition: Int32
    error_code: Int16
    high_watermark: Int64
    last_stable_offset: Int64
    log_start_offset: Int64
    aborted: tuple[AbortedTransaction, ...] | None
    preferred_read_replica: Int32
    records: Records


class FetchedTopic(NamedTuple):
    """Read partitions of a topic."""

    name: String
    partitions: tuple[FetchedPartition, ...]


class FetchResponse(NamedTuple):
    """Fetch response (API key 1). With session id 0 there is no session, and clients send complete requests."""

    throttle_time_ms: Int32
    error_code: Int16
    session_id: Int32
    topics: tuple[FetchedTopic, ...]


class ListOffsetsPartition(NamedTuple):
    """Partition to look up. `timestamp` is a time in milliseconds, `LATEST` or `EARLIEST`."""

    partition: Int32
    timestamp: Int64


class ListOffsetsTopic(NamedTuple):
    """Partitions of a topic to look up."""

    name: String
    partitions: tuple[ListOffsetsPartition, ...]


class ListOffsetsRequest(NamedTuple):
    """ListOffsets request (API key 2): the first, the last, or the offset at a time, of each partition."""

    replica_id: Int32
    isolation_level: Int8
    topics: tuple[ListOffsetsTopic, ...]


class ListedPartition(NamedTuple):
    """Result of a look-up: the offset of the first record at or after the requested time, -1 if there is none."""

    partition: Int32
    error_code: Int16
    timestamp: Int64
    offset: Int64


class ListedTopic(NamedTuple):
    """Results for the partitions of a topic."""

    name: String
    partitions: tuple[ListedPartition, ...]


class ListOffsetsResponse(NamedTuple):
    """ListOffsets response (API key 2): the offsets that were looked up."""

    throttle_time_ms: Int32
    topics: tuple[ListedTopic, ...]


class ProducePartition(NamedTuple):
    """One record batch for a partition."""

    partition: Int32
    records: Records


class ProduceTopic(NamedTuple):
    """The batches for a topic."""

    name: String
    partitions: tuple[ProducePartition, ...]


class ProduceRequest(NamedTuple):
    """Produce request (API key 0). With `acks` 0 there is no response; 1 and -1 are the same here."""

    transactional_id: NullableString
    acks: Int16
    timeout_ms: Int32
    topics: tuple[ProduceTopic, ...]


class ProducedPartition(NamedTuple):
    """Result of storing a batch. `base_offset` is its offset, -1 if it was refused."""

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
    """Produce response (API key 0) once all batches are durable."""

    topics: tuple[ProducedTopic, ...]
    throttle_time_ms: Int32


class InitProducerIdRequest(NamedTuple):
    """InitProducerId request (API key 22): a producer id, or the ownership of a transactional id.

    With a transactional id the caller becomes its owner, and the previous owner is fenced. An owner sends its producer
    id and epoch to get its next epoch (KIP-360).
    """

    transactional_id: NullableString
    transaction_timeout_ms: Int32
    producer_id: Annotated[Int64, Since(3, -1)] = -1
    producer_epoch: Annotated[Int16, Since(3, -1)] = -1


class InitProducerIdResponse(NamedTuple):
    """InitProducerId response (API key 22): the producer id and the epoch to send with batches."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64
    producer_epoch: Int16
