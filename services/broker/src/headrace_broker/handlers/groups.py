"""Handlers of consumer groups: join, sync, heartbeat, leave, list, describe, delete, and OffsetCommit and
OffsetFetch.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import groupby

from headrace_broker import reads
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, Phase
from headrace_broker.protocol.groups import (
    CommitPartition,
    CommittedPartition,
    CommittedTopic,
    CommitTopic,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeletedGroup,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribedMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FetchedOffset,
    FetchedOffsets,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchTopic,
    SyncGroupRequest,
    SyncGroupResponse,
)

_OFFSET_METADATA_BYTES_MAX = 4_096
"""Maximum characters of the metadata of a committed offset, as in Apache Kafka."""


async def join_group(broker: Broker, call: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse:
    """Handle JoinGroup: add a member to its group, and respond once the next generation is complete."""
    return await broker.coordinator.join(request, call.client_id, call.client_host)


async def sync_group(broker: Broker, call: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse:
    """Handle SyncGroup: respond with the member's assignment once the leader has sent it."""
    return await broker.coordinator.sync(request)


async def heartbeat(broker: Broker, call: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse:
    """Handle Heartbeat: extend the session of a member."""
    broker.coordinator.heartbeat(request)
    return HeartbeatResponse(0, Code.NONE)


async def leave_group(broker: Broker, call: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse:
    """Handle LeaveGroup: remove a member from its group."""
    await broker.coordinator.leave(request)
    return LeaveGroupResponse(0, Code.NONE)


async def list_groups(broker: Broker, call: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    """Handle ListGroups: return all groups."""
    groups = tuple(ListedGroup(group.id, group.protocol_type) for group in broker.coordinator.all())
    return ListGroupsResponse(0, Code.NONE, groups)


async def describe_groups(
    broker: Broker, call: RequestContext, request: DescribeGroupsRequest
) -> DescribeGroupsResponse:
    """Handle DescribeGroups: return states and members. A group that does not exist has the state `Dead`."""
    groups = [(group_id, broker.coordinator.find(group_id)) for group_id in request.groups]
    dead = DescribedGroup(Code.NONE, "", "Dead", "", "", ())
    return DescribeGroupsResponse(
        0, tuple(_described(group) if group else dead._replace(group_id=group_id) for group_id, group in groups)
    )


async def delete_groups(broker: Broker, call: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    """Handle DeleteGroups: delete groups without members, with their offsets."""
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
    """Handle ConsumerGroupHeartbeat of the newer group protocol by an error. If the broker did not know this API,
    librdkafka would wait for ever."""
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


async def offset_commit(broker: Broker, call: RequestContext, request: OffsetCommitRequest) -> OffsetCommitResponse:
    """Handle OffsetCommit: store offsets of a group."""
    codes = {
        (topic.name, p.partition): check_offset(broker, topic.name, p)
        for topic in request.topics
        for p in topic.partitions
    }
    failure = Code.NONE
    try:
        await broker.coordinator.commit(request, accepted_topics(request.topics, codes))
    except Rejected as error:
        failure = error.code
    return OffsetCommitResponse(0, commit_results(request.topics, codes, failure))


async def offset_fetch(broker: Broker, call: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Handle OffsetFetch: return committed offsets of a group. As in Kafka, partitions without one have the offset
    -1."""
    if request.require_stable:
        await broker.writer.submit(_do_nothing)  # waits for earlier commits of other clients
    offsets, unstable = await broker.readers.run(reads.read_committed_offsets, request.group_id)
    if not request.require_stable:
        unstable = frozenset()
    topics = request.topics
    if topics is None:
        by_topic = groupby(offsets, key=lambda key: key[0])
        topics = tuple(OffsetFetchTopic(name, tuple(number for _, number in keys)) for name, keys in by_topic)
    commit_results = tuple(
        FetchedOffsets(t.name, tuple(_fetched(offsets, unstable, t.name, n) for n in t.partitions)) for t in topics
    )
    return OffsetFetchResponse(0, commit_results, Code.NONE)


def _do_nothing() -> None:
    """Operation without effect. Submitted to the writer, it completes after all earlier operations, so that a caller
    can wait for them."""


def _fetched(
    offsets: dict[tuple[str, int], tuple[int, str | None]], unstable: Set[tuple[str, int]], topic: str, number: int
) -> FetchedOffset:
    if (topic, number) in unstable:
        return FetchedOffset(number, -1, -1, "", Code.UNSTABLE_OFFSET_COMMIT)
    offset, metadata = offsets.get((topic, number), (-1, ""))
    return FetchedOffset(number, offset, -1, metadata, Code.NONE)


def check_offset(broker: Broker, topic: str, partition: CommitPartition) -> Code:
    """Return the error code with which the commit of an offset must be refused, or NONE."""
    if broker.catalog.view(topic, partition.partition) is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if len(partition.metadata or "") > _OFFSET_METADATA_BYTES_MAX:
        return Code.OFFSET_METADATA_TOO_LARGE
    return Code.NONE


def accepted_topics(topics: tuple[CommitTopic, ...], codes: dict[tuple[str, int], Code]) -> tuple[CommitTopic, ...]:
    """Return `topics` with only those partitions whose error code in `codes` is NONE."""
    return tuple(
        CommitTopic(topic.name, tuple(p for p in topic.partitions if codes[topic.name, p.partition] is Code.NONE))
        for topic in topics
    )


def commit_results(
    topics: tuple[CommitTopic, ...], codes: dict[tuple[str, int], Code], failure: Code
) -> tuple[CommittedTopic, ...]:
    """Build the result of a commit: for each partition its own error code, or `failure` if that is NONE."""
    return tuple(
        CommittedTopic(
            topic.name,
            tuple(CommittedPartition(p.partition, codes[topic.name, p.partition] or failure) for p in topic.partitions),
        )
        for topic in topics
    )
