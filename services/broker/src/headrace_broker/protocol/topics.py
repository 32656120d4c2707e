"""Messages about topics: CreateTopics 3 to 4, DeleteTopics 1, DescribeConfigs 1, IncrementalAlterConfigs 0,
CreatePartitions 0 to 1, DeleteRecords 0 to 1 and DescribeLogDirs 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, Int64, NullableString, String


class ReplicaAssignment(NamedTuple):
    """Brokers on which the client requests the replicas of a partition."""

    partition: Int32
    broker_ids: tuple[Int32, ...]


class ConfigEntry(NamedTuple):
    """Setting of a topic, with Kafka's name."""

    name: String
    value: NullableString


class NewTopic(NamedTuple):
    """Topic to create. Its partitions are requested by their number, or by `assignments` and -1 as the number.

    Without `assignments`, -1 requests the broker's default number of partitions or of replicas, which is 1.
    """

    name: String
    partitions: Int32
    replication_factor: Int16
    assignments: tuple[ReplicaAssignment, ...]
    configs: tuple[ConfigEntry, ...]


class CreateTopicsRequest(NamedTuple):
    """CreateTopics request (API key 19)."""

    topics: tuple[NewTopic, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatedTopic(NamedTuple):
    """Result of creating a topic or of adding partitions to it. The error message contains a remedy."""

    name: String
    error_code: Int16
    error_message: NullableString


class CreateTopicsResponse(NamedTuple):
    """CreateTopics response (API key 19) with a result for each topic."""

    throttle_time_ms: Int32
    topics: tuple[CreatedTopic, ...]


class DeleteTopicsRequest(NamedTuple):
    """DeleteTopics request (API key 20) with the names of topics."""

    names: tuple[String, ...]
    timeout_ms: Int32


class DeletedTopic(NamedTuple):
    """Result of deleting one topic."""

    name: String
    error_code: Int16


class DeleteTopicsResponse(NamedTuple):
    """DeleteTopics response (API key 20) with a result for each topic."""

    throttle_time_ms: Int32
    topics: tuple[DeletedTopic, ...]


class ConfigResource(NamedTuple):
    """Topic (`type` 2) or broker (`type` 4) whose settings are requested. `keys` None requests all settings."""

    type: Int8
    name: String
    keys: tuple[String, ...] | None


class DescribeConfigsRequest(NamedTuple):
    """DescribeConfigs request (API key 32) with the topics or brokers whose settings are requested."""

    resources: tuple[ConfigResource, ...]
    include_synonyms: Bool


class ConfigSynonym(NamedTuple):
    """Another source of a setting's value. The broker never returns any."""

    name: String
    value: NullableString
    source: Int8


class DescribedConfig(NamedTuple):
    """Value of a setting. `source` is 1 if the topic sets it, 4 if the broker sets it, 5 for a default."""

    name: String
    value: NullableString
    read_only: Bool
    source: Int8
    is_sensitive: Bool
    synonyms: tuple[ConfigSynonym, ...]


class DescribedResource(NamedTuple):
    """Settings of one topic or of the broker."""

    error_code: Int16
    error_message: NullableString
    type: Int8
    name: String
    configs: tuple[DescribedConfig, ...]


class DescribeConfigsResponse(NamedTuple):
    """DescribeConfigs response (API key 32) with the requested settings."""

    throttle_time_ms: Int32
    results: tuple[DescribedResource, ...]


class AlteredEntry(NamedTuple):
    """Change of a setting. `operation` 0 sets it, 1 resets it to its default, 2 adds to a list, 3 removes from a
    list."""

    name: String
    operation: Int8
    value: NullableString


class AlteredResource(NamedTuple):
    """Topic (`type` 2) whose settings are to be changed."""

    type: Int8
    name: String
    configs: tuple[AlteredEntry, ...]


class IncrementalAlterConfigsRequest(NamedTuple):
    """IncrementalAlterConfigs request (API key 44) with the changes of settings."""

    resources: tuple[AlteredResource, ...]
    validate_only: Bool


class AlteredResult(NamedTuple):
    """Result of changing the settings of one topic. Either all its changes are made, or none."""

    error_code: Int16
    error_message: NullableString
    type: Int8
    name: String


class IncrementalAlterConfigsResponse(NamedTuple):
    """IncrementalAlterConfigs response (API key 44) with a result for each topic."""

    throttle_time_ms: Int32
    results: tuple[AlteredResult, ...]


class NewReplicas(NamedTuple):
    """Brokers on which the client requests the replicas of a new partition."""

    broker_ids: tuple[Int32, ...]


class MorePartitions(NamedTuple):
    """Topic that gets more partitions. `total` is its number of partitions afterwards."""

    name: String
    total: Int32
    assignments: tuple[NewReplicas, ...] | None


class CreatePartitionsRequest(NamedTuple):
    """CreatePartitions request (API key 37)."""

    topics: tuple[MorePartitions, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatePartitionsResponse(NamedTuple):
    """CreatePartitions response (API key 37) with a result for each topic."""

    throttle_time_ms: Int32
    results: tuple[CreatedTopic, ...]


class DeleteRecordsPartition(NamedTuple):
    """Partition whose records before `offset` are to be deleted. -1 stands for the end of the log."""

    partition: Int32
    offset: Int64


class DeleteRecordsTopic(NamedTuple):
    """Partitions of a topic whose records are to be deleted."""

    name: String
    partitions: tuple[DeleteRecordsPartition, ...]


class DeleteRecordsRequest(NamedTuple):
    """DeleteRecords request (API key 21) with the offsets before which records are to be deleted."""

    topics: tuple[DeleteRecordsTopic, ...]
    timeout_ms: Int32


class CutPartition(NamedTuple):
    """Result of deleting records of a partition. `low_watermark` is the first remaining offset, or -1 after an
    error."""

    partition: Int32
    low_watermark: Int64
    error_code: Int16


class CutTopic(NamedTuple):
    """Results of deleting records of a topic's partitions."""

    name: String
    partitions: tuple[CutPartition, ...]


class DeleteRecordsResponse(NamedTuple):
    """DeleteRecords response (API key 21) with a result for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CutTopic, ...]


class LogDirTopic(NamedTuple):
    """Partitions of a topic whose sizes are requested."""

    name: String
    partitions: tuple[Int32, ...]


class DescribeLogDirsRequest(NamedTuple):
    """DescribeLogDirs request (API key 35). `topics` None requests all topics."""

    topics: tuple[LogDirTopic, ...] | None


class LogDirPartition(NamedTuple):
    """Size of one partition: the bytes of its record batches on disk."""

    partition: Int32
    size_bytes: Int64
    offset_lag: Int64
    is_future: Bool


class MeasuredTopic(NamedTuple):
    """Sizes of the partitions of a topic."""

    name: String
    partitions: tuple[LogDirPartition, ...]


class LogDir(NamedTuple):
    """Folder with the sizes of the partitions in it. This broker has only one folder."""

    error_code: Int16
    path: String
    topics: tuple[MeasuredTopic, ...]


class DescribeLogDirsResponse(NamedTuple):
    """DescribeLogDirs response (API key 35) with the sizes of the requested partitions."""

    throttle_time_ms: Int32
    dirs: tuple[LogDir, ...]
