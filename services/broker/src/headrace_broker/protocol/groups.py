"""Messages of consumer groups, and of the offsets that they commit.

JoinGroup 5, SyncGroup 3, Heartbeat 1, LeaveGroup 1, ListGroups 1, DescribeGroups 2, DeleteGroups 1, OffsetCommit 3 and
OffsetFetch 1 to 7. ConsumerGroupHeartbeat is defined only so that it can be refused; if the broker did not know it, a
client with the newer group protocol would wait for ever.
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
    """Member of the group in the response to the leader, which assigns the partitions."""

    member_id: String
    group_instance_id: NullableString
    metadata: Bytes


class JoinGroupResponse(NamedTuple):
    """JoinGroup response (API key 11), sent once all members of the generation have joined. Only the leader gets
    `members`."""

    throttle_time_ms: Int32
    error_code: Int16
    generation_id: Int32
    protocol_name: String
    leader: String
    member_id: String
    members: tuple[JoinedMember, ...]


class Assignment(NamedTuple):
    """Partitions assigned to a member, as bytes that the broker does not interpret."""

    member_id: String
    assignment: Bytes


class SyncGroupRequest(NamedTuple):
    """SyncGroup request (API key 14). The leader sends the assignments of all members; other members send an empty
    list."""

    group_id: String
    generation_id: Int32
    member_id: String
    group_instance_id: NullableString
    assignments: tuple[Assignment, ...]


class SyncGroupResponse(NamedTuple):
    """SyncGroup response (API key 14) with the member's assignment, sent once the leader has assigned the
    partitions."""

    throttle_time_ms: Int32
    error_code: Int16
    assignment: Bytes


class HeartbeatRequest(NamedTuple):
    """Heartbeat request (API key 12): a member reports that it is alive."""

    group_id: String
    generation_id: Int32
    member_id: String


class HeartbeatResponse(NamedTuple):
    """Heartbeat response (API key 12). Error code 27 means that the member must rejoin, 22 and 25 that it must join as
    a new member."""

    throttle_time_ms: Int32
    error_code: Int16


class LeaveGroupRequest(NamedTuple):
    """LeaveGroup request (API key 13) by which a member leaves its group."""

    group_id: String
    member_id: String


class LeaveGroupResponse(NamedTuple):
    """LeaveGroup response (API key 13) with an error code."""

    throttle_time_ms: Int32
    error_code: Int16


class ListGroupsRequest(NamedTuple):
    """ListGroups request (API key 16) for all groups of the broker."""


class ListedGroup(NamedTuple):
    """Group in a ListGroups response. `protocol_type` is `consumer` for groups of consumers, and empty for a group that
    never had members."""

    group_id: String
    protocol_type: String


class ListGroupsResponse(NamedTuple):
    """ListGroups response (API key 16) with all groups of the broker."""

    throttle_time_ms: Int32
    error_code: Int16
    groups: tuple[ListedGroup, ...]


class DescribeGroupsRequest(NamedTuple):
    """DescribeGroups request (API key 15) with the ids of groups."""

    groups: tuple[String, ...]


class DescribedMember(NamedTuple):
    """Member in the description of a group. The host begins with a slash, as Java prints addresses."""

    member_id: String
    client_id: String
    client_host: String
    metadata: Bytes
    assignment: Bytes


class DescribedGroup(NamedTuple):
    """Description of a group. `state` is a value of `Phase`, or `Dead` if the group does not exist."""

    error_code: Int16
    group_id: String
    state: String
    protocol_type: String
    protocol_name: String
    members: tuple[DescribedMember, ...]


class DescribeGroupsResponse(NamedTuple):
    """DescribeGroups response (API key 15) with states and members of groups."""

    throttle_time_ms: Int32
    groups: tuple[DescribedGroup, ...]


class DeleteGroupsRequest(NamedTuple):
    """DeleteGroups request (API key 42) with the ids of groups to delete, including their offsets."""

    groups: tuple[String, ...]


class DeletedGroup(NamedTuple):
    """Result of deleting one group."""

    group_id: String
    error_code: Int16


class DeleteGroupsResponse(NamedTuple):
    """DeleteGroups response (API key 42) with a result for each group."""

    throttle_time_ms: Int32
    results: tuple[DeletedGroup, ...]


class OwnedTopic(NamedTuple):
    """Partitions of a topic that a member of the newer group protocol owns. The UUID of the topic is sent as two
    halves."""

    id_high: Int64
    id_low: Int64
    partitions: tuple[Int32, ...]


class ConsumerGroupHeartbeatRequest(NamedTuple):
    """ConsumerGroupHeartbeat request (API key 68), by which a client joins or stays in a group of the newer protocol
    (KIP-848)."""

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
    """ConsumerGroupHeartbeat response (API key 68), which always contains an error here.

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
    """Offset to commit for a partition: that of the next record to read. The metadata is a text that the broker stores
    with it."""

    partition: Int32
    offset: Int64
    metadata: NullableString


class CommitTopic(NamedTuple):
    """Offsets to commit for the partitions of a topic."""

    name: String
    partitions: tuple[CommitPartition, ...]


class OffsetCommitRequest(NamedTuple):
    """OffsetCommit request (API key 8). A client that assigns partitions itself sends generation -1 and an empty member
    id."""

    group_id: String
    generation_id: Int32
    member_id: String
    retention_time_ms: Int64
    topics: tuple[CommitTopic, ...]


class CommittedPartition(NamedTuple):
    """Error code of committing the offset of one partition."""

    partition: Int32
    error_code: Int16


class CommittedTopic(NamedTuple):
    """Error codes of committing the offsets of a topic's partitions."""

    name: String
    partitions: tuple[CommittedPartition, ...]


class OffsetCommitResponse(NamedTuple):
    """OffsetCommit response (API key 8) with an error code for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class OffsetFetchTopic(NamedTuple):
    """Partitions of a topic whose committed offsets are requested."""

    name: String
    partitions: tuple[Int32, ...]


class OffsetFetchRequest(NamedTuple):
    """OffsetFetch request (API key 9). `topics` None requests all offsets of the group (since version 2).

    With `require_stable`, the offset of a partition is refused (88) while an open transaction may still replace it.
    """

    group_id: String
    topics: tuple[OffsetFetchTopic, ...] | None
    require_stable: Annotated[Bool, Since(7, False)] = False


class FetchedOffset(NamedTuple):
    """Committed offset of a partition, or -1 if none was committed. The leader epoch is always -1."""

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
    """OffsetFetch response (API key 9) with committed offsets of a group."""

    throttle_time_ms: Annotated[Int32, Since(3, 0)]
    topics: tuple[FetchedOffsets, ...]
    error_code: Annotated[Int16, Since(2, 0)]
