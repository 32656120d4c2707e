"""OffsetCommit 3 and OffsetFetch 1 to 7."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bool, Int16, Int32, Int64, NullableString, Since, String


class CommitPartition(NamedTuple):
    """Offset to commit for a partition, which is that of its next record, with metadata that the group stores."""

    partition: Int32
    offset: Int64
    metadata: NullableString


class CommitTopic(NamedTuple):
    """Offsets to commit for a topic."""

    name: String
    partitions: tuple[CommitPartition, ...]


class OffsetCommitRequest(NamedTuple):
    """OffsetCommit request (API key 8). Generation -1 without a member is a client with manual assignment."""

    group_id: String
    generation_id: Int32
    member_id: String
    retention_time_ms: Int64
    topics: tuple[CommitTopic, ...]


class CommittedPartition(NamedTuple):
    """Result of committing the offset of one partition."""

    partition: Int32
    error_code: Int16


class CommittedTopic(NamedTuple):
    """Results of committing the offsets of a topic's partitions."""

    name: String
    partitions: tuple[CommittedPartition, ...]


class OffsetCommitResponse(NamedTuple):
    """OffsetCommit response (API key 8): result for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class OffsetFetchTopic(NamedTuple):
    """Partitions of a topic whose offsets are requested."""

    name: String
    partitions: tuple[Int32, ...]


class OffsetFetchRequest(NamedTuple):
    """OffsetFetch request (API key 9). None requests all offsets of the group (since version 2).

    With `require_stable`, an offset that an open transaction may still replace is refused (88).
    """

    group_id: String
    topics: tuple[OffsetFetchTopic, ...] | None
    require_stable: Annotated[Bool, Since(7, False)] = False


class FetchedOffset(NamedTuple):
    """Committed offset of a partition, -1 without one. The leader epoch is always -1."""

    partition: Int32
    offset: Int64
    leader_epoch: Annotated[Int32, Since(5, -1)]
    metadata: NullableString
    error_code: Int16


class FetchedOffsets(NamedTuple):
    """Committed offsets of a topic's partitions."""

    name: String
    partitions: tuple[FetchedOffset, ...]


class OffsetFetchResponse(NamedTuple):
    """OffsetFetch response (API key 9): committed offsets of a group."""

    throttle_time_ms: Annotated[Int32, Since(3, 0)]
    topics: tuple[FetchedOffsets, ...]
    error_code: Annotated[Int16, Since(2, 0)]
