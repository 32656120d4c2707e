"""CreateTopics 3, DeleteTopics 1 and DescribeConfigs 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, NullableString, String


class ReplicaAssignment(NamedTuple):
    """A partition's replicas, named by hand."""

    partition: Int32
    broker_ids: tuple[Int32, ...]


class ConfigEntry(NamedTuple):
    """A setting of a topic by Kafka's name."""

    name: String
    value: NullableString


class NewTopic(NamedTuple):
    """A topic to create, with a number of partitions or with assignments (and then -1)."""

    name: String
    partitions: Int32
    replication_factor: Int16
    assignments: tuple[ReplicaAssignment, ...]
    configs: tuple[ConfigEntry, ...]


class CreateTopicsRequest(NamedTuple):
    """Key 19."""

    topics: tuple[NewTopic, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatedTopic(NamedTuple):
    """What became of a topic; the message says what to change."""

    name: String
    error_code: Int16
    error_message: NullableString


class CreateTopicsResponse(NamedTuple):
    """Answers key 19."""

    throttle_time_ms: Int32
    topics: tuple[CreatedTopic, ...]


class DeleteTopicsRequest(NamedTuple):
    """Key 20."""

    names: tuple[String, ...]
    timeout_ms: Int32


class DeletedTopic(NamedTuple):
    """What became of a topic."""

    name: String
    error_code: Int16


class DeleteTopicsResponse(NamedTuple):
    """Answers key 20."""

    throttle_time_ms: Int32
    topics: tuple[DeletedTopic, ...]


class ConfigResource(NamedTuple):
    """`type` 2 is a topic, 4 the broker. No keys asks for all settings."""

    type: Int8
    name: String
    keys: tuple[String, ...] | None


class DescribeConfigsRequest(NamedTuple):
    """Key 32."""

    resources: tuple[ConfigResource, ...]
    include_synonyms: Bool


class ConfigSynonym(NamedTuple):
    """Where a value comes from; not used, the list stays empty."""

    name: String
    value: NullableString
    source: Int8


class DescribedConfig(NamedTuple):
    """A setting. `source` 1 was set on the topic, 4 by the broker, 5 is a default."""

    name: String
    value: NullableString
    read_only: Bool
    source: Int8
    is_sensitive: Bool
    synonyms: tuple[ConfigSynonym, ...]


class DescribedResource(NamedTuple):
    """The settings of one resource."""

    error_code: Int16
    error_message: NullableString
    type: Int8
    name: String
    configs: tuple[DescribedConfig, ...]


class DescribeConfigsResponse(NamedTuple):
    """Answers key 32."""

    throttle_time_ms: Int32
    results: tuple[DescribedResource, ...]
