"""OffsetCommit 3 and OffsetFetch 3."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int16, Int32, Int64, NullableString, String


class CommitPartition(NamedTuple):
    partition: Int32
    offset: Int64
    metadata: NullableString


class CommitTopic(NamedTuple):
    name: String
    partitions: tuple[CommitPartition, ...]


class OffsetCommitRequest(NamedTuple):
    group_id: String
    generation_id: Int32
    member_id: String
    retention_time_ms: Int64
    topics: tuple[CommitTopic, ...]


class CommittedPartition(NamedTuple):
    partition: Int32
    error_code: Int16


class CommittedTopic(NamedTuple):
    name: String
    partitions: tuple[CommittedPartition, ...]


class OffsetCommitResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class OffsetFetchTopic(NamedTuple):
    name: String
    partitions: tuple[Int32, ...]


class OffsetFetchRequest(NamedTuple):
    group_id: String
    topics: tuple[OffsetFetchTopic, ...] | None


class FetchedOffset(NamedTuple):
    partition: Int32
    offset: Int64
    metadata: NullableString
    error_code: Int16


class FetchedOffsets(NamedTuple):
    name: String
    partitions: tuple[FetchedOffset, ...]


class OffsetFetchResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[FetchedOffsets, ...]
    error_code: Int16
