"""Requests of consumer groups, and of the offsets that they commit.

JoinGroup 5, SyncGroup 3, Heartbeat 1, LeaveGroup 1, ListGroups 1, DescribeGroups 2, DeleteGroups 1, OffsetCommit 3 and
OffsetFetch 1 to 7. ConsumerGroupHeartbeat is only refused. Without it a client with the newer group protocol would wait
for ever.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bool, Bytes, Int8, Int16, Int32, Int64, NullableString, Since, String


class Protocol(NamedTuple):
    """Assignment protocol that a member supports, with metadata that the broker does not interpret."""

    name: String
    metadata: Bytes


class JoinGroupRequest(NamedTuple):
    """JoinGroup request (API key 11): a client joins or rejoins a group.

    With an empty member id the broker assigns one. A group instance id makes the member static.
    """

    group_id: String
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    member_id: String
    group_instance_id: NullableString
    protocol_type: String
    protocols: tuple[Protocol, ...]


class JoinedMember(NamedTuple):
    """Member of the group, as the leader gets it to assign partitions."""

    member_id: String
    group_instance_id: NullableString
    metadata: Bytes


class JoinGroupResponse(NamedTuple):
    """JoinGroup response (API key 11) once the generation is complete. Only the leader gets `members`."""

    throttle_time_ms: Int32
    error_code: Int16
    generation_id: Int32
    protocol_name: String
    leader: String
    member_id: String
    members: tuple[JoinedMember, ...]


class Assignment(NamedTuple):
    """Assignment of a member, in bytes that the broker does not interpret."""

    member_id: String
    assignment: Bytes


class SyncGroupRequest(NamedTuple):
    """SyncGroup request (API key 14). The leader sends the assignments, other members send an empty list."""

    group_id: String
    generation_id: Int32
    member_id: String
    group_instance_id: NullableString
    assignments: tuple[Assignment, ...]


class SyncGroupResponse(NamedTuple):
    """SyncGroup response (API key 14) once the leader has assigned."""

    throttle_time_ms: Int32
    error_code: Int16
    assignment: Bytes


class HeartbeatRequest(NamedTuple):
    """Heartbeat request (API key 12): a member reports that it is alive."""

    group_id: String
    generation_id: Int32
    member_id: String


class HeartbeatResponse(NamedTuple):
    """Heartbeat response (API key 12): NONE, rejoin (27), or join anew (22, 25)."""

    throttle_time_ms: Int32
    error_code: Int16


class LeaveGroupRequest(NamedTuple):
    """LeaveGroup request (API key 13): a member leaves its group."""

    group_id: String
    member_id: String


class LeaveGroupResponse(NamedTuple):
    """LeaveGroup response (API key 13): whether the member has left."""

    throttle_time_ms: Int32
    error_code: Int16


class ListGroupsRequest(NamedTuple):
    """ListGroups request (API key 16): all groups of the broker."""


class ListedGroup(NamedTuple):
    """Group in a list. `protocol_type` is `consumer` for consumers, and empty for a group that only has offsets."""

    group_id: String
    protocol_type: String


class ListGroupsResponse(NamedTuple):
    """ListGroups response (API key 16): all groups of the broker."""

    throttle_time_ms: Int32
    error_code: Int16
    groups: tuple[ListedGroup, ...]


class DescribeGroupsRequest(NamedTuple):
    """DescribeGroups request (API key 15): groups to describe."""

    groups: tuple[String, ...]


class DescribedMember(NamedTuple):
    """Member of a group. The host begins with a slash, as Java prints addresses."""

    member_id: String
    client_id: String
    client_host: String
    metadata: Bytes
    assignment: Bytes


class DescribedGroup(NamedTuple):
    """Description of a group. `state` is a `Phase`, or `Dead` for a group that does not exist."""

    error_code: Int16
    group_id: String
    state: String
    protocol_type: String
    protocol_name: String
    members: tuple[DescribedMember, ...]


class DescribeGroupsResponse(NamedTuple):
    """DescribeGroups response (API key 15): states and members of groups."""

    throttle_time_ms: Int32
    groups: tuple[DescribedGroup, ...]


class DeleteGroupsRequest(NamedTuple):
    """DeleteGroups request (API key 42): groups to delete with their offsets."""

    groups: tuple[String, ...]


class DeletedGroup(NamedTuple):
    """Result of deleting a group."""

    group_id: String
    error_code: Int16


class DeleteGroupsResponse(NamedTuple):
    """DeleteGroups response (API key 42): result for each group."""

    throttle_time_ms: Int32
    results: tuple[DeletedGroup, ...]


class OwnedTopic(NamedTuple):
    """Topic in the newer group protocol, by the two halves of its UUID."""

    id_high: Int64
    id_low: Int64
    partitions: tuple[Int32, ...]


class ConsumerGroupHeartbeatRequest(NamedTuple):
    """ConsumerGroupHeartbeat request (API key 68): join or stay in a group of the newer protocol, KIP-848."""

    group_id: String
    member_id: String
    member_epoch: Int32
    instance_id: NullableString
    rack_id: NullableString
    rebalance_timeout_ms: Int32
    subscribed_topics: tuple[String, ...] | None
    subscribed_pattern: Annotated[NullableString, Since(1, None)]
    assignor: NullableString
    owned: tuple[OwnedTopic, ...] | None


class ConsumerGroupHeartbeatResponse(NamedTuple):
    """ConsumerGroupHeartbeat response (API key 68), which always contains an error.

    `assignment` -1 means that no assignment follows.
    """

    throttle_time_ms: Int32
    error_code: Int16
    error_message: NullableString
    member_id: NullableString
    member_epoch: Int32
    heartbeat_interval_ms: Int32
    assignment: Int8


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
