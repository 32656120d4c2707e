"""Fetch 11 and ListOffsets 2."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int8, Int16, Int32, Int64, Records, String

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2


class FetchPartition(NamedTuple):
    """Where to read from. `current_leader_epoch` and `log_start_offset` are between brokers and unused."""

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
    """Part of fetch sessions, which are not used."""

    name: String
    partitions: tuple[Int32, ...]


class FetchRequest(NamedTuple):
    """Key 1. Wait at most `max_wait_ms` for `min_bytes`; `isolation_level` 1 is read_committed."""

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
    """Readers skip this producer's records from `first_offset` to its next abort marker."""

    producer_id: Int64
    first_offset: Int64


class FetchedPartition(NamedTuple):
    """Whole batches, the first of which may begin before the offset that was asked for."""

    partition: Int32
    error_code: Int16
    high_watermark: Int64
    last_stable_offset: Int64
    log_start_offset: Int64
    aborted: tuple[AbortedTransaction, ...] | None
    preferred_read_replica: Int32
    records: Records


class FetchedTopic(NamedTuple):
    """The partitions of a topic, as read."""

    name: String
    partitions: tuple[FetchedPartition, ...]


class FetchResponse(NamedTuple):
    """Answers key 1. Session id 0: no session, send everything again next time."""

    throttle_time_ms: Int32
    error_code: Int16
    session_id: Int32
    topics: tuple[FetchedTopic, ...]


class ListOffsetsPartition(NamedTuple):
    """`timestamp` is a time in milliseconds, `LATEST` or `EARLIEST`."""

    partition: Int32
    timestamp: Int64


class ListOffsetsTopic(NamedTuple):
    """The partitions of a topic to look at."""

    name: String
    partitions: tuple[ListOffsetsPartition, ...]


class ListOffsetsRequest(NamedTuple):
    """Key 2."""

    replica_id: Int32
    isolation_level: Int8
    topics: tuple[ListOffsetsTopic, ...]


class ListedPartition(NamedTuple):
    """The first record not older than the time asked for; offset -1 when there is none."""

    partition: Int32
    error_code: Int16
    timestamp: Int64
    offset: Int64


class ListedTopic(NamedTuple):
    """The partitions of a topic, as looked up."""

    name: String
    partitions: tuple[ListedPartition, ...]


class ListOffsetsResponse(NamedTuple):
    """Answers key 2."""

    throttle_time_ms: Int32
    topics: tuple[ListedTopic, ...]
