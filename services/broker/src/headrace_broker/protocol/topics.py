"""CreateTopics 3 to 4, DeleteTopics 1, DescribeConfigs 1, IncrementalAlterConfigs 0, CreatePartitions 0 to 1,
DeleteRecords 0 to 1 and DescribeLogDirs 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, Int64, NullableString, String


class ReplicaAssignment(NamedTuple):
    """A partition's replicas, named by hand."""

    partition: Int32
    broker_ids: tuple[Int32, ...]


class ConfigEntry(NamedTuple):
    """A setting of a topic by Kafka's name."""

    name: String
    value: NullableString


class NewTopic(NamedTuple):
    """A topic to create, with a number of partitions or with assignments (and then -1).

    Without either, -1 is the broker's default for partitions as for replicas: one.
    """

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


class AlteredEntry(NamedTuple):
    """A change of a setting: 0 sets it, 1 takes it back to its default, 2 and 3 add to and take from a list."""

    name: String
    operation: Int8
    value: NullableString


class AlteredResource(NamedTuple):
    """`type` 2 is a topic."""

    type: Int8
    name: String
    configs: tuple[AlteredEntry, ...]


class IncrementalAlterConfigsRequest(NamedTuple):
    """Key 44."""

    resources: tuple[AlteredResource, ...]
    validate_only: Bool


class AlteredResult(NamedTuple):
    """What became of a resource's changes: all of them or none."""

    error_code: Int16
    error_message: NullableString
    type: Int8
    name: String


class IncrementalAlterConfigsResponse(NamedTuple):
    """Answers key 44."""

    throttle_time_ms: Int32
    results: tuple[AlteredResult, ...]


class NewReplicas(NamedTuple):
    """The replicas of a new partition, named by hand."""

    broker_ids: tuple[Int32, ...]


class MorePartitions(NamedTuple):
    """How many partitions the topic is to have in all."""

    name: String
    total: Int32
    assignments: tuple[NewReplicas, ...] | None


class CreatePartitionsRequest(NamedTuple):
    """Key 37."""

    topics: tuple[MorePartitions, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatePartitionsResponse(NamedTuple):
    """Answers key 37."""

    throttle_time_ms: Int32
    results: tuple[CreatedTopic, ...]


class DeleteRecordsPartition(NamedTuple):
    """Everything before the offset goes; -1 is the end of what is decided."""

    partition: Int32
    offset: Int64


class DeleteRecordsTopic(NamedTuple):
    """The partitions of a topic to cut."""

    name: String
    partitions: tuple[DeleteRecordsPartition, ...]


class DeleteRecordsRequest(NamedTuple):
    """Key 21."""

    topics: tuple[DeleteRecordsTopic, ...]
    timeout_ms: Int32


class CutPartition(NamedTuple):
    """Where a partition's log begins now, -1 with an error."""

    partition: Int32
    low_watermark: Int64
    error_code: Int16


class CutTopic(NamedTuple):
    """The partitions of a topic, as cut."""

    name: String
    partitions: tuple[CutPartition, ...]


class DeleteRecordsResponse(NamedTuple):
    """Answers key 21."""

    throttle_time_ms: Int32
    topics: tuple[CutTopic, ...]


class LogDirTopic(NamedTuple):
    """Partitions to measure."""

    name: String
    partitions: tuple[Int32, ...]


class DescribeLogDirsRequest(NamedTuple):
    """Key 35. No list asks for all topics."""

    topics: tuple[LogDirTopic, ...] | None


class LogDirPartition(NamedTuple):
    """The bytes of a partition's record batches."""

    partition: Int32
    size_bytes: Int64
    offset_lag: Int64
    is_future: Bool


class MeasuredTopic(NamedTuple):
    """The partitions of a topic, as measured."""

    name: String
    partitions: tuple[LogDirPartition, ...]


class LogDir(NamedTuple):
    """A folder with logs; here there is one."""

    error_code: Int16
    path: String
    topics: tuple[MeasuredTopic, ...]


class DescribeLogDirsResponse(NamedTuple):
    """Answers key 35."""

    throttle_time_ms: Int32
    dirs: tuple[LogDir, ...]
