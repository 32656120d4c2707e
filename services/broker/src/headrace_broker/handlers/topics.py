"""Handlers of topics: CreateTopics, DeleteTopics, DescribeConfigs, IncrementalAlterConfigs, CreatePartitions,
DeleteRecords, DescribeLogDirs.
"""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from headrace_broker import topic_config
from headrace_broker.broker import NODE_ID, REQUEST_BYTES_MAX, Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.topics import (
    AlteredEntry,
    AlteredResource,
    AlteredResult,
    ConfigResource,
    CreatedTopic,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    CutPartition,
    CutTopic,
    DeletedTopic,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribedConfig,
    DescribedResource,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    LogDir,
    LogDirPartition,
    LogDirTopic,
    MeasuredTopic,
    MorePartitions,
    NewTopic,
)
from headrace_broker.topic_config import TopicConfig
from headrace_broker.topics import PartitionView

_TOPIC = 2
_BROKER = 4
_FROM_TOPIC, _FROM_BROKER_FILE, _FROM_DEFAULT = 1, 4, 5
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)


async def create_topics(broker: Broker, call: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """Handle CreateTopics. Each topic is created by an operation of its own, so a refused topic does not affect the
    others."""
    waits = {}
    occurrences = collections.Counter(topic.name for topic in request.topics)
    for topic in {topic.name: topic for topic in request.topics}.values():
        create = partial(_create, broker, topic, occurrences[topic.name], request.validate_only)
        waits[topic.name] = broker.writer.submit(create)
    created = []
    for name, wait in waits.items():
        try:
            await wait
            created.append(CreatedTopic(name, Code.NONE, None))
        except Rejected as error:
            created.append(CreatedTopic(name, error.code, str(error)))
    return CreateTopicsResponse(0, tuple(created))


async def delete_topics(broker: Broker, call: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    """Handle DeleteTopics. Each topic is deleted by an operation of its own."""
    waits = {name: broker.writer.submit(partial(broker.topics.delete, name)) for name in request.names}
    deleted = []
    for name, wait in waits.items():
        try:
            await wait
            deleted.append(DeletedTopic(name, Code.NONE))
        except Rejected as error:
            deleted.append(DeletedTopic(name, error.code))
    return DeleteTopicsResponse(0, tuple(deleted))


async def describe_configs(
    broker: Broker, call: RequestContext, request: DescribeConfigsRequest
) -> DescribeConfigsResponse:
    """Handle DescribeConfigs: return the settings of topics and of the broker."""
    return DescribeConfigsResponse(0, tuple(_described(broker, resource) for resource in request.resources))


def _create(broker: Broker, topic: NewTopic, times: int, validate_only: bool) -> None:
    """Create a topic, or refuse it if it occurs more than once in the request. Runs in the writer's thread."""
    if times > 1:
        raise Rejected(Code.INVALID_REQUEST, f"topic {topic.name} occurs {times} times in one request")
    config = topic_config_of(broker, ((entry.name, entry.value) for entry in topic.configs))
    broker.topics.create(topic.name, _partition_count(topic), config, validate_only=validate_only)


def topic_config_of(broker: Broker, entries: Iterable[tuple[str, str | None]]) -> TopicConfig:
    """Parse the settings of a topic, and check their limits.

    Raises:
        Rejected: this broker does not support a setting (40).
    """
    config = topic_config.parse(entries)
    if config.max_message_bytes > REQUEST_BYTES_MAX:
        limit = f"{REQUEST_BYTES_MAX} bytes, the largest request of the broker"
        raise Rejected(Code.INVALID_CONFIG, f"max.message.bytes = {config.max_message_bytes}: exceeds {limit}")
    return config


def _partition_count(topic: NewTopic) -> int:
    """Return the requested number of partitions, which is either a field of the request or the number of its
    assignments."""
    if topic.assignments:
        numbers = sorted(assignment.partition for assignment in topic.assignments)
        is_here = all(assignment.broker_ids == (NODE_ID,) for assignment in topic.assignments)
        if (
            not is_here
            or numbers != list(range(len(numbers)))
            or topic.partitions != -1
            or topic.replication_factor != -1
        ):
            raise Rejected(Code.INVALID_REPLICA_ASSIGNMENT, f"each partition must be on broker {NODE_ID} alone")
        return len(numbers)
    if topic.replication_factor not in (1, -1):
        raise Rejected(
            Code.INVALID_REPLICATION_FACTOR,
            f"{topic.replication_factor} replicas: must be 1, because there is one broker",
        )
    return 1 if topic.partitions == -1 else topic.partitions


def _described(broker: Broker, resource: ConfigResource) -> DescribedResource:
    try:
        configs = _configs(broker, resource)
    except Rejected as error:
        return DescribedResource(error.code, str(error), resource.type, resource.name, ())
    requested = tuple(config for config in configs if resource.keys is None or config.name in resource.keys)
    return DescribedResource(Code.NONE, None, resource.type, resource.name, requested)


def _configs(broker: Broker, resource: ConfigResource) -> list[DescribedConfig]:
    if resource.type == _TOPIC:
        topic = broker.catalog.topics.get(resource.name)
        if topic is None:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {resource.name} does not exist")
        default = topic_config.TopicConfig().entries()
        entries = topic.config.entries().items()
        return [
            DescribedConfig(name, value, False, _FROM_DEFAULT if value == default.get(name) else _FROM_TOPIC, False, ())
            for name, value in entries
        ]
    if resource.type == _BROKER and resource.name == str(NODE_ID):
        values = {"auto.create.topics.enable": "false", "default.replication.factor": "1", "broker.id": str(NODE_ID)}
        return [DescribedConfig(name, value, True, _FROM_BROKER_FILE, False, ()) for name, value in values.items()]
    raise Rejected(Code.INVALID_REQUEST, f"there is no resource of type {resource.type} and name {resource.name!r}")


async def alter_configs(
    broker: Broker, call: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    """Handle IncrementalAlterConfigs. Each resource is changed by an operation of its own, which makes all its changes
    or none."""
    results = []
    for resource in request.resources:
        code, text = Code.NONE, None
        try:
            if resource.type != _TOPIC:
                raise Rejected(Code.INVALID_REQUEST, "only the settings of topics can be altered")
            change = partial(_changed_config, broker, resource)
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
    """Handle CreatePartitions: add partitions to topics, each by an operation of its own."""
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
    """Handle DeleteRecords: delete the records before the offsets of the request."""
    answers = []
    for topic in request.topics:
        cuts = [await _cut(broker, topic.name, partition) for partition in topic.partitions]
        answers.append(CutTopic(topic.name, tuple(cuts)))
    return DeleteRecordsResponse(0, tuple(answers))


async def describe_log_dirs(
    broker: Broker, call: RequestContext, request: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    """Handle DescribeLogDirs: return the size of each partition, which is the sum of the sizes of its record
    batches."""
    if request.topics is None:
        requested = [LogDirTopic(t.name, tuple(range(len(t.partitions)))) for t in broker.catalog.topics.values()]
    else:
        requested = list(request.topics)
    sizes: defaultdict[str, list[LogDirPartition]] = defaultdict(list)
    for topic in requested:
        for number in topic.partitions:
            view = broker.catalog.view(topic.name, number)
            if view is not None:
                sizes[topic.name].append(LogDirPartition(number, view.bytes, 0, False))
    topics = tuple(MeasuredTopic(name, tuple(partitions)) for name, partitions in sizes.items())
    return DescribeLogDirsResponse(0, (LogDir(Code.NONE, broker.folder, topics),))


def _changed_config(broker: Broker, resource: AlteredResource, config: TopicConfig) -> TopicConfig:
    """Return `config` with the changes that the request contains. Runs in the writer's thread."""
    entries = config.non_default()
    for change in resource.configs:
        _apply(entries, change)
    return topic_config_of(broker, entries.items())


def _apply(entries: dict[str, str], change: AlteredEntry) -> None:
    if change.operation == _DELETE:
        entries.pop(change.name, None)
        return
    if change.value is None:
        raise Rejected(Code.INVALID_CONFIG, f"{change.name}: a value is required")
    if change.operation == _SET:
        entries[change.name] = change.value
        return
    if change.operation not in (_APPEND, _SUBTRACT) or change.name != "cleanup.policy":
        raise Rejected(Code.INVALID_CONFIG, f"{change.name} is not a list: it can only be set or deleted")
    present = entries.get(change.name, TopicConfig().cleanup_policy).split(",")
    operands = [part.strip() for part in change.value.split(",")]
    if change.operation == _APPEND:
        parts = present + [part for part in operands if part not in present]
    else:
        parts = [part for part in present if part not in operands]
    entries[change.name] = ",".join(parts)


def _check_replicas(broker: Broker, topic: MorePartitions) -> None:
    state = broker.catalog.topics.get(topic.name)
    if topic.assignments is None or state is None:
        return
    is_here = all(assignment.broker_ids == (NODE_ID,) for assignment in topic.assignments)
    if not is_here or len(topic.assignments) != topic.total - len(state.partitions):
        raise Rejected(Code.INVALID_REPLICA_ASSIGNMENT, f"each new partition must be on broker {NODE_ID} alone")


async def _cut(broker: Broker, topic: str, request: DeleteRecordsPartition) -> CutPartition:
    try:
        view = broker.view(topic, request.partition)
        before = _cut_offset(broker, view, request.offset)
        await broker.writer.submit(partial(broker.upkeep.cut, view.id, before))
    except Rejected as error:
        broker.stats.errors[error.code] += 1
        return CutPartition(request.partition, -1, error.code)
    return CutPartition(request.partition, max(view.start, before), Code.NONE)


def _cut_offset(broker: Broker, view: PartitionView, offset: int) -> int:
    if not broker.catalog.topics[view.topic].config.deletes:
        raise Rejected(Code.POLICY_VIOLATION, f"{view.topic} is compacted: its records cannot be deleted by offset")
    before = view.end if offset == -1 else offset
    if not 0 <= before <= view.end:
        raise Rejected(
            Code.OFFSET_OUT_OF_RANGE, f"offset {offset}: must be between 0 and {view.end}, the end of the log"
        )
    return before
