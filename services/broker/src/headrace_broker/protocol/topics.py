"""CreateTopics 3, DeleteTopics 1 and DescribeConfigs 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, NullableString, String


class ReplicaAssignment(NamedTuple):
    partition: Int32
    broker_ids: tuple[Int32, ...]


class ConfigEntry(NamedTuple):
    name: String
    value: NullableString


class NewTopic(NamedTuple):
    name: String
    partitions: Int32
    replication_factor: Int16
    assignments: tuple[ReplicaAssignment, ...]
    configs: tuple[ConfigEntry, ...]


class CreateTopicsRequest(NamedTuple):
    topics: tuple[NewTopic, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatedTopic(NamedTuple):
    name: String
    error_code: Int16
    error_message: NullableString


class CreateTopicsResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[CreatedTopic, ...]


class DeleteTopicsRequest(NamedTuple):
    names: tuple[String, ...]
    timeout_ms: Int32


class DeletedTopic(NamedTuple):
    name: String
    error_code: Int16


class DeleteTopicsResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[DeletedTopic, ...]


class ConfigResource(NamedTuple):
    type: Int8
    name: String
    keys: tuple[String, ...] | None


class DescribeConfigsRequest(NamedTuple):
    resources: tuple[ConfigResource, ...]
    include_synonyms: Bool


class ConfigSynonym(NamedTuple):
    name: String
    value: NullableString
    source: Int8


class DescribedConfig(NamedTuple):
    name: String
    value: NullableString
    read_only: Bool
    source: Int8
    is_sensitive: Bool
    synonyms: tuple[ConfigSynonym, ...]


class DescribedResource(NamedTuple):
    error_code: Int16
    error_message: NullableString
    type: Int8
    name: String
    configs: tuple[DescribedConfig, ...]


class DescribeConfigsResponse(NamedTuple):
    throttle_time_ms: Int32
    results: tuple[DescribedResource, ...]
