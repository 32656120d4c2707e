"""Handlers of CreateTopics, DeleteTopics and DescribeConfigs."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from functools import partial

from headrace_broker import topic_config
from headrace_broker.broker import NODE_ID, REQUEST_BYTES_MAX, Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.topics import (
    ConfigResource,
    CreatedTopic,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletedTopic,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribedConfig,
    DescribedResource,
    NewTopic,
)
from headrace_broker.topic_config import TopicConfig

_TOPIC, _BROKER = 2, 4
_FROM_TOPIC, _FROM_BROKER_FILE, _FROM_DEFAULT = 1, 4, 5


async def create_topics(broker: Broker, call: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """Create topics. Each is a separate operation, so a refused topic does not affect the others."""
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
    """Delete topics. Each is a separate operation."""
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
    """Handle DescribeConfigs."""
    return DescribeConfigsResponse(0, tuple(_described(broker, resource) for resource in request.resources))


def _create(broker: Broker, topic: NewTopic, times: int, validate_only: bool) -> None:
    """Create a topic that occurs `times` times in the request. Runs in the writer's thread."""
    if times > 1:
        raise Rejected(Code.INVALID_REQUEST, f"topic {topic.name} occurs {times} times in one request")
    config = topic_config_of(broker, ((entry.name, entry.value) for entry in topic.configs))
    broker.topics.create(topic.name, _partition_count(topic), config, validate_only=validate_only)


def topic_config_of(broker: Broker, entries: Iterable[tuple[str, str | None]]) -> TopicConfig:
    """Parse the settings of a topic. Raises `Rejected` (40) for settings that this broker does not support."""
    config = topic_config.parse(entries)
    if config.max_message_bytes > REQUEST_BYTES_MAX:
        limit = f"{REQUEST_BYTES_MAX} bytes, the largest request of the broker"
        raise Rejected(Code.INVALID_CONFIG, f"max.message.bytes = {config.max_message_bytes}: exceeds {limit}")
    return config


def _partition_count(topic: NewTopic) -> int:
    """Return the number of partitions, which the request states directly or by the replicas of each partition."""
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
