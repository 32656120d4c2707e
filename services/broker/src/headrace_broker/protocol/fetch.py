"""Fetch 11 and ListOffsets 2."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int8, Int16, Int32, Int64, Records, String

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2


class FetchPartition(NamedTuple):
    partition: Int32
    current_leader_epoch: Int32
    fetch_offset: Int64
    log_start_offset: Int64
    max_bytes: Int32


class FetchTopic(NamedTuple):
    name: String
    partitions: tuple[FetchPartition, ...]


class ForgottenTopic(NamedTuple):
    name: String
    partitions: tuple[Int32, ...]


class FetchRequest(NamedTuple):
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
    producer_id: Int64
    first_offset: Int64


class FetchedPartition(NamedTuple):
    partition: Int32
    error_code: Int16
    high_watermark: Int64
    last_stable_offset: Int64
    log_start_offset: Int64
    aborted: tuple[AbortedTransaction, ...] | None
    preferred_read_replica: Int32
    records: Records


class FetchedTopic(NamedTuple):
    name: String
    partitions: tuple[FetchedPartition, ...]


class FetchResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16
    session_id: Int32
    topics: tuple[FetchedTopic, ...]


class ListOffsetsPartition(NamedTuple):
    partition: Int32
    timestamp: Int64


class ListOffsetsTopic(NamedTuple):
    name: String
    partitions: tuple[ListOffsetsPartition, ...]


class ListOffsetsRequest(NamedTuple):
    replica_id: Int32
    isolation_level: Int8
    topics: tuple[ListOffsetsTopic, ...]


class ListedPartition(NamedTuple):
    partition: Int32
    error_code: Int16
    timestamp: Int64
    offset: Int64


class ListedTopic(NamedTuple):
    name: String
    partitions: tuple[ListedPartition, ...]


class ListOffsetsResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[ListedTopic, ...]
