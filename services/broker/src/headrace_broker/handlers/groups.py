"""Handlers of consumer groups: join, sync, heartbeat, leave, list, describe, delete."""

from __future__ import annotations

from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, Phase
from headrace_broker.protocol.groups import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeletedGroup,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribedMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)


async def join_group(broker: Broker, call: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse:
    """Handle JoinGroup."""
    return await broker.coordinator.join(request, call.client_id, call.client_host)


async def sync_group(broker: Broker, call: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse:
    """Handle SyncGroup."""
    return await broker.coordinator.sync(request)


async def heartbeat(broker: Broker, call: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse:
    """Handle Heartbeat."""
    broker.coordinator.heartbeat(request)
    return HeartbeatResponse(0, Code.NONE)


async def leave_group(broker: Broker, call: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse:
    """Handle LeaveGroup."""
    await broker.coordinator.leave(request)
    return LeaveGroupResponse(0, Code.NONE)


async def list_groups(broker: Broker, call: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    """Handle ListGroups."""
    groups = tuple(ListedGroup(group.id, group.protocol_type) for group in broker.coordinator.all())
    return ListGroupsResponse(0, Code.NONE, groups)


async def describe_groups(
    broker: Broker, call: RequestContext, request: DescribeGroupsRequest
) -> DescribeGroupsResponse:
    """Handle DescribeGroups. A group that does not exist has the state `Dead`."""
    groups = [(group_id, broker.coordinator.find(group_id)) for group_id in request.groups]
    dead = DescribedGroup(Code.NONE, "", "Dead", "", "", ())
    return DescribeGroupsResponse(
        0, tuple(_described(group) if group else dead._replace(group_id=group_id) for group_id, group in groups)
    )


async def delete_groups(broker: Broker, call: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    """Handle DeleteGroups."""
    results = []
    for group_id in request.groups:
        try:
            await broker.coordinator.delete(group_id)
            results.append(DeletedGroup(group_id, Code.NONE))
        except Rejected as error:
            results.append(DeletedGroup(group_id, error.code))
    return DeleteGroupsResponse(0, tuple(results))


async def consumer_group_heartbeat(
    broker: Broker, call: RequestContext, request: ConsumerGroupHeartbeatRequest
) -> ConsumerGroupHeartbeatResponse:
    """Refuse ConsumerGroupHeartbeat with a message. Without this API librdkafka would wait for ever."""
    text = "this broker supports only the classic group protocol; set group.protocol=classic, or run Apache Kafka"
    broker.stats.errors[Code.UNSUPPORTED_VERSION] += 1
    return ConsumerGroupHeartbeatResponse(0, Code.UNSUPPORTED_VERSION, text, None, -1, 0, -1)


def _described(group: Group) -> DescribedGroup:
    is_stable = group.phase is Phase.STABLE
    members = tuple(
        DescribedMember(
            member.id,
            member.client_id,
            member.client_host,
            member.metadata(group.protocol) if is_stable else b"",
            member.assignment,
        )
        for member in group.members.values()
    )
    protocol = group.protocol if is_stable else ""
    return DescribedGroup(Code.NONE, group.id, group.phase, group.protocol_type, protocol, members)
