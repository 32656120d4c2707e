"""JoinGroup 5, SyncGroup 3, Heartbeat 1, LeaveGroup 1, ListGroups 1, DescribeGroups 2 and DeleteGroups 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bytes, Int16, Int32, NullableString, String


class Protocol(NamedTuple):
    """A way to assign partitions that a member offers; the metadata is between the clients."""

    name: String
    metadata: Bytes


class JoinGroupRequest(NamedTuple):
    group_id: String
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    member_id: String
    group_instance_id: NullableString
    protocol_type: String
    protocols: tuple[Protocol, ...]


class JoinedMember(NamedTuple):
    member_id: String
    group_instance_id: NullableString
    metadata: Bytes


class JoinGroupResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16
    generation_id: Int32
    protocol_name: String
    leader: String
    member_id: String
    members: tuple[JoinedMember, ...]


class Assignment(NamedTuple):
    member_id: String
    assignment: Bytes


class SyncGroupRequest(NamedTuple):
    group_id: String
    generation_id: Int32
    member_id: String
    group_instance_id: NullableString
    assignments: tuple[Assignment, ...]


class SyncGroupResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16
    assignment: Bytes


class HeartbeatRequest(NamedTuple):
    group_id: String
    generation_id: Int32
    member_id: String


class HeartbeatResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16


class LeaveGroupRequest(NamedTuple):
    group_id: String
    member_id: String


class LeaveGroupResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16


class ListGroupsRequest(NamedTuple):
    pass


class ListedGroup(NamedTuple):
    group_id: String
    protocol_type: String


class ListGroupsResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16
    groups: tuple[ListedGroup, ...]


class DescribeGroupsRequest(NamedTuple):
    groups: tuple[String, ...]


class DescribedMember(NamedTuple):
    member_id: String
    client_id: String
    client_host: String
    metadata: Bytes
    assignment: Bytes


class DescribedGroup(NamedTuple):
    error_code: Int16
    group_id: String
    state: String
    protocol_type: String
    protocol_name: String
    members: tuple[DescribedMember, ...]


class DescribeGroupsResponse(NamedTuple):
    throttle_time_ms: Int32
    groups: tuple[DescribedGroup, ...]


class DeleteGroupsRequest(NamedTuple):
    groups: tuple[String, ...]


class DeletedGroup(NamedTuple):
    group_id: String
    error_code: Int16


class DeleteGroupsResponse(NamedTuple):
    throttle_time_ms: Int32
    results: tuple[DeletedGroup, ...]
