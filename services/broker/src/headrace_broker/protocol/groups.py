"""JoinGroup 5, SyncGroup 3, Heartbeat 1, LeaveGroup 1, ListGroups 1, DescribeGroups 2 and DeleteGroups 1.

ConsumerGroupHeartbeat is known as far as it takes to refuse it: a client of the newer group protocol would otherwise
wait for ever.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bytes, Int8, Int16, Int32, Int64, NullableString, Since, String


class Protocol(NamedTuple):
    """A way to assign partitions that a member offers; the metadata is between the clients."""

    name: String
    metadata: Bytes


class JoinGroupRequest(NamedTuple):
    """Key 11. An empty member id asks for one; a group instance id makes the member static."""

    group_id: String
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    member_id: String
    group_instance_id: NullableString
    protocol_type: String
    protocols: tuple[Protocol, ...]


class JoinedMember(NamedTuple):
    """What the leader learns of each member, to assign by."""

    member_id: String
    group_instance_id: NullableString
    metadata: Bytes


class JoinGroupResponse(NamedTuple):
    """Answers key 11 once the generation is complete. `members` is for the leader alone."""

    throttle_time_ms: Int32
    error_code: Int16
    generation_id: Int32
    protocol_name: String
    leader: String
    member_id: String
    members: tuple[JoinedMember, ...]


class Assignment(NamedTuple):
    """What the leader gives a member; the bytes are between the clients."""

    member_id: String
    assignment: Bytes


class SyncGroupRequest(NamedTuple):
    """Key 14. The leader brings the assignments, the others nothing."""

    group_id: String
    generation_id: Int32
    member_id: String
    group_instance_id: NullableString
    assignments: tuple[Assignment, ...]


class SyncGroupResponse(NamedTuple):
    """Answers key 14 once the leader has assigned."""

    throttle_time_ms: Int32
    error_code: Int16
    assignment: Bytes


class HeartbeatRequest(NamedTuple):
    """Key 12."""

    group_id: String
    generation_id: Int32
    member_id: String


class HeartbeatResponse(NamedTuple):
    """Answers key 12: all is well, rejoin (27), or start over (22, 25)."""

    throttle_time_ms: Int32
    error_code: Int16


class LeaveGroupRequest(NamedTuple):
    """Key 13."""

    group_id: String
    member_id: String


class LeaveGroupResponse(NamedTuple):
    """Answers key 13."""

    throttle_time_ms: Int32
    error_code: Int16


class ListGroupsRequest(NamedTuple):
    """Key 16."""


class ListedGroup(NamedTuple):
    """`protocol_type` is `consumer` for consumers, empty for a group that only has offsets."""

    group_id: String
    protocol_type: String


class ListGroupsResponse(NamedTuple):
    """Answers key 16."""

    throttle_time_ms: Int32
    error_code: Int16
    groups: tuple[ListedGroup, ...]


class DescribeGroupsRequest(NamedTuple):
    """Key 15."""

    groups: tuple[String, ...]


class DescribedMember(NamedTuple):
    """A member; the host has a slash in front, as Java prints addresses."""

    member_id: String
    client_id: String
    client_host: String
    metadata: Bytes
    assignment: Bytes


class DescribedGroup(NamedTuple):
    """A group; `state` is a `Phase`, or `Dead` for one that does not exist."""

    error_code: Int16
    group_id: String
    state: String
    protocol_type: String
    protocol_name: String
    members: tuple[DescribedMember, ...]


class DescribeGroupsResponse(NamedTuple):
    """Answers key 15."""

    throttle_time_ms: Int32
    groups: tuple[DescribedGroup, ...]


class DeleteGroupsRequest(NamedTuple):
    """Key 42."""

    groups: tuple[String, ...]


class DeletedGroup(NamedTuple):
    """What became of a group."""

    group_id: String
    error_code: Int16


class DeleteGroupsResponse(NamedTuple):
    """Answers key 42."""

    throttle_time_ms: Int32
    results: tuple[DeletedGroup, ...]


class OwnedTopic(NamedTuple):
    """Part of the newer group protocol: a topic by its id, two halves of a UUID."""

    id_high: Int64
    id_low: Int64
    partitions: tuple[Int32, ...]


class ConsumerGroupHeartbeatRequest(NamedTuple):
    """Key 68 (KIP-848)."""

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
    """Answers key 68; here always with an error. -1 says that no assignment follows."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: NullableString
    member_id: NullableString
    member_epoch: Int32
    heartbeat_interval_ms: Int32
    assignment: Int8
