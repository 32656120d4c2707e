"""What administrators change and measure: settings and partitions of topics, the start of a log, its size."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from headrace_broker.broker import NODE_ID, Broker, RequestContext
from headrace_broker.catalog import PartitionView
from headrace_broker.errors import Code, Rejected
from headrace_broker.handlers.topics import parsed
from headrace_broker.protocol.topics import (
    AlteredEntry,
    AlteredResource,
    AlteredResult,
    CreatedTopic,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CutPartition,
    CutTopic,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    LogDir,
    LogDirPartition,
    LogDirTopic,
    MeasuredTopic,
    MorePartitions,
)
from headrace_broker.topic_config import TopicConfig

_TOPIC = 2
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)


async def alter_configs(
    broker: Broker, call: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    """Each resource in an operation of its own, all of its changes or none."""
    results = []
    for resource in request.resources:
        code, text = Code.NONE, None
        try:
            if resource.type != _TOPIC:
                raise Rejected(Code.INVALID_REQUEST, "only topics' settings can be altered; the broker's are its own")
            change = partial(_changed, broker, resource)
            alter = partial(broker.topics.alter, resource.name, change, validate_only=request.validate_only)
            await broker.writer.submit(alter)
        except Rejected as error:
            code, text = error.code, str(error)
            broker.stats.errors[code] += 1
        results.append(AlteredResult(code, text, resource.type, resource.name))
    return IncrementalAlterConfigsResponse(0, tuple(results))


async def create_partitions(
    broker: Broker, call: RequestContext, request: CreatePartitionsRequest
) -> CreatePartitionsResponse:
    results = []
    for topic in request.topics:
        code, text = Code.NONE, None
        try:
            _check_replicas(broker, topic)
            grow = partial(broker.topics.grow, topic.name, topic.total, validate_only=request.validate_only)
            await broker.writer.submit(grow)
        except Rejected as error:
            code, text = error.code, str(error)
            broker.stats.errors[code] += 1
        results.append(CreatedTopic(topic.name, code, text))
    return CreatePartitionsResponse(0, tuple(results))


async def delete_records(broker: Broker, call: RequestContext, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    answers = []
    for topic in request.topics:
        cuts = [await _cut(broker, topic.name, partition) for partition in topic.partitions]
        answers.append(CutTopic(topic.name, tuple(cuts)))
    return DeleteRecordsResponse(0, tuple(answers))


async def describe_log_dirs(
    broker: Broker, call: RequestContext, request: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    """One folder; the sizes are those of the record batches, as retention counts them."""
    if request.topics is None:
        wanted = [LogDirTopic(t.name, tuple(range(len(t.partitions)))) for t in broker.catalog.topics.values()]
    else:
        wanted = list(request.topics)
    found: defaultdict[str, list[LogDirPartition]] = defaultdict(list)
    for topic in wanted:
        for number in topic.partitions:
            view = broker.catalog.view(topic.name, number)
            if view is not None:
                found[topic.name].append(LogDirPartition(number, view.bytes, 0, False))
    topics = tuple(MeasuredTopic(name, tuple(partitions)) for name, partitions in found.items())
    return DescribeLogDirsResponse(0, (LogDir(Code.NONE, broker.folder, topics),))


def _changed(broker: Broker, resource: AlteredResource, config: TopicConfig) -> TopicConfig:
    """On the writer's thread."""
    entries = config.given()
    for change in resource.configs:
        _apply(entries, change)
    return parsed(broker, entries.items())


def _apply(entries: dict[str, str], change: AlteredEntry) -> None:
    if change.operation == _DELETE:
        entries.pop(change.name, None)
        return
    if change.value is None:
        raise Rejected(Code.INVALID_CONFIG, f"{change.name} has no value")
    if change.operation == _SET:
        entries[change.name] = change.value
        return
    if change.operation not in (_APPEND, _SUBTRACT) or change.name != "cleanup.policy":
        raise Rejected(Code.INVALID_CONFIG, f"{change.name} is no list: it can be set and deleted")
    present = entries.get(change.name, TopicConfig().cleanup_policy).split(",")
    named = [part.strip() for part in change.value.split(",")]
    if change.operation == _APPEND:
        kept = present + [part for part in named if part not in present]
    else:
        kept = [part for part in present if part not in named]
    entries[change.name] = ",".join(kept)


def _check_replicas(broker: Broker, topic: MorePartitions) -> None:
    found = broker.catalog.topics.get(topic.name)
    if topic.assignments is None or found is None:
        return
    here = all(assignment.broker_ids == (NODE_ID,) for assignment in topic.assignments)
    if not here or len(topic.assignments) != topic.total - len(found.partitions):
        raise Rejected(Code.INVALID_REPLICA_ASSIGNMENT, f"each new partition can be on broker {NODE_ID} alone")


async def _cut(broker: Broker, topic: str, asked: DeleteRecordsPartition) -> CutPartition:
    try:
        view = broker.view(topic, asked.partition)
        before = _checked_cut(broker, view, asked.offset)
        await broker.writer.submit(partial(broker.upkeep.cut, view.id, before))
    except Rejected as error:
        broker.stats.errors[error.code] += 1
        return CutPartition(asked.partition, -1, error.code)
    return CutPartition(asked.partition, max(view.start, before), Code.NONE)


def _checked_cut(broker: Broker, view: PartitionView, offset: int) -> int:
    if not broker.catalog.topics[view.topic].config.deletes:
        raise Rejected(Code.POLICY_VIOLATION, f"{view.topic} is compacted: its records are not deleted by offset")
    before = view.end if offset == -1 else offset
    if not 0 <= before <= view.end:
        raise Rejected(Code.OFFSET_OUT_OF_RANGE, f"offset {offset}; the log ends at {view.end}")
    return before
