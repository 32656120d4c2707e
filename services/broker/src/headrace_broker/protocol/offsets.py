"""OffsetCommit 3 and OffsetFetch 1 to 7."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bool, Int16, Int32, Int64, NullableString, Since, String


class CommitPartition(NamedTuple):
    """The offset to go on from, and a text that the group keeps with it."""

    partition: Int32
    offset: Int64
    metadata: NullableString


class CommitTopic(NamedTuple):
    """The partitions of a topic to commit."""

    name: String
    partitions: tuple[CommitPartition, ...]


class OffsetCommitRequest(NamedTuple):
    """Key 8. Generation -1 and no member is somebody who assigns partitions by hand."""

    group_id: String
    generation_id: Int32
    member_id: String
    retention_time_ms: Int64
    topics: tuple[CommitTopic, ...]


class CommittedPartition(NamedTuple):
    """Whether a partition's offset was taken."""

    partition: Int32
    error_code: Int16


class CommittedTopic(NamedTuple):
    """The partitions of a topic, as committed."""

    name: String
    partitions: tuple[CommittedPartition, ...]


class OffsetCommitResponse(NamedTuple):
    """Answers key 8."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class OffsetFetchTopic(NamedTuple):
    """The partitions of a topic to look up."""

    name: String
    partitions: tuple[Int32, ...]


class OffsetFetchRequest(NamedTuple):
    """Key 9. No list asks for all that the group has (from version 2 on).

    With `require_stable`, an offset that an open transaction may still replace is refused (88).
    """

    group_id: String
    topics: tuple[OffsetFetchTopic, ...] | None
    require_stable: Annotated[Bool, Since(7, False)] = False


class FetchedOffset(NamedTuple):
    """A committed offset; -1 when there is none. Leader epochs are between brokers and always -1."""

    partition: Int32
    offset: Int64
    leader_epoch: Annotated[Int32, Since(5, -1)]
    metadata: NullableString
    error_code: Int16


class FetchedOffsets(NamedTuple):
    """The partitions of a topic, as looked up."""

    name: String
    partitions: tuple[FetchedOffset, ...]


class OffsetFetchResponse(NamedTuple):
    """Answers key 9."""

    throttle_time_ms: Annotated[Int32, Since(3, 0)]
    topics: tuple[FetchedOffsets, ...]
    error_code: Annotated[Int16, Since(2, 0)]
