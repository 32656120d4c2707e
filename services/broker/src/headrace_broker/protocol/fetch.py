"""Fetch 11 and ListOffsets 2."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int8, Int16, Int32, Int64, Records, String

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2


class FetchPartition(NamedTuple):
    """Offset to read from. `current_leader_epoch` and `log_start_offset` are for brokers and unused."""

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
    """Request with API key 1. Wait at most `max_wait_ms` for `min_bytes`; `isolation_level` 1 is read_committed."""

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
    """Complete batches of a partition. The first one may begin before the requested offset."""

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
    """Response for API key 1. With session id 0 there is no session, and clients send complete requests."""

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
    """Request with API key 2."""

    replica_id: Int32
    isolation_level: Int8
    topics: tuple[ListOffsetsTopic, ...]


class ListedPartition(NamedTuple):
    """Offset of the first record at or after the requested time, -1 without one."""

    partition: Int32
    error_code: Int16
    timestamp: Int64
    offset: Int64


class ListedTopic(NamedTuple):
    """Results for the partitions of a topic."""

    name: String
    partitions: tuple[ListedPartition, ...]


class ListOffsetsResponse(NamedTuple):
    """Response for API key 2."""

    throttle_time_ms: Int32
    topics: tuple[ListedTopic, ...]
