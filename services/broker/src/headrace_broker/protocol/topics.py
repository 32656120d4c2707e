"""CreateTopics 3 to 4, DeleteTopics 1, DescribeConfigs 1, IncrementalAlterConfigs 0, CreatePartitions 0 to 1,
DeleteRecords 0 to 1 and DescribeLogDirs 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, Int64, NullableString, String


class ReplicaAssignment(NamedTuple):
    """Explicit replicas of a partition."""

    partition: Int32
    broker_ids: tuple[Int32, ...]


class ConfigEntry(NamedTuple):
    """Setting of a topic by Kafka's name."""

    name: String
    value: NullableString


class NewTopic(NamedTuple):
    """Topic to create, with a number of partitions, or with assignments and -1 as the number.

    Without assignments -1 requests the broker's default number of partitions and of replicas, which is 1.
    """

    name: String
    partitions: Int32
    replication_factor: Int16
    assignments: tuple[ReplicaAssignment, ...]
    configs: tuple[ConfigEntry, ...]


class CreateTopicsRequest(NamedTuple):
    """CreateTopics request (API key 19): topics to create."""

    topics: tuple[NewTopic, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatedTopic(NamedTuple):
    """Result of creating or extending a topic. The message contains the remedy."""

    name: String
    error_code: Int16
    error_message: NullableString


class CreateTopicsResponse(NamedTuple):
    """CreateTopics response (API key 19): result for each topic."""

    throttle_time_ms: Int32
    topics: tuple[CreatedTopic, ...]


class DeleteTopicsRequest(NamedTuple):
    """DeleteTopics request (API key 20): topics to delete."""

    names: tuple[String, ...]
    timeout_ms: Int32


class DeletedTopic(NamedTuple):
    """Result of deleting a topic."""

    name: String
    error_code: Int16


class DeleteTopicsResponse(NamedTuple):
    """DeleteTopics response (API key 20): result for each topic."""

    throttle_time_ms: Int32
    topics: tuple[DeletedTopic, ...]


class ConfigResource(NamedTuple):
    """Resource with settings. `type` is 2 for a topic and 4 for the broker. None as `keys` requests all settings."""

    type: Int8
    name: String
    keys: tuple[String, ...] | None


class DescribeConfigsRequest(NamedTuple):
    """DescribeConfigs request (API key 32): resources whose settings are requested."""

    resources: tuple[ConfigResource, ...]
    include_synonyms: Bool


class ConfigSynonym(NamedTuple):
    """Origin of a setting's value. The broker never returns one."""

    name: String
    value: NullableString
    source: Int8


class DescribedConfig(NamedTuple):
    """Description of a setting. `source` is 1 if the topic sets it, 4 for the broker, 5 for a default."""

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
    """DescribeConfigs response (API key 32): settings of each resource."""

    throttle_time_ms: Int32
    results: tuple[DescribedResource, ...]


class AlteredEntry(NamedTuple):
    """Change of a setting: 0 sets it, 1 resets it to its default, 2 adds to a list, 3 removes from it."""

    name: String
    operation: Int8
    value: NullableString


class AlteredResource(NamedTuple):
    """Resource whose settings are changed. `type` is 2 for a topic."""

    type: Int8
    name: String
    configs: tuple[AlteredEntry, ...]


class IncrementalAlterConfigsRequest(NamedTuple):
    """IncrementalAlterConfigs request (API key 44): settings to change."""

    resources: tuple[AlteredResource, ...]
    validate_only: Bool


class AlteredResult(NamedTuple):
    """Result of the changes of one resource, which are all made or none."""

    error_code: Int16
    error_message: NullableString
    type: Int8
    name: String


class IncrementalAlterConfigsResponse(NamedTuple):
    """IncrementalAlterConfigs response (API key 44): result for each resource."""

    throttle_time_ms: Int32
    results: tuple[AlteredResult, ...]


class NewReplicas(NamedTuple):
    """Explicit replicas of a new partition."""

    broker_ids: tuple[Int32, ...]


class MorePartitions(NamedTuple):
    """New total number of partitions of a topic."""

    name: String
    total: Int32
    assignments: tuple[NewReplicas, ...] | None


class CreatePartitionsRequest(NamedTuple):
    """CreatePartitions request (API key 37): topics that get more partitions."""

    topics: tuple[MorePartitions, ...]
    timeout_ms: Int32
    validate_only: Bool


class CreatePartitionsResponse(NamedTuple):
    """CreatePartitions response (API key 37): result for each topic."""

    throttle_time_ms: Int32
    results: tuple[CreatedTopic, ...]


class DeleteRecordsPartition(NamedTuple):
    """Partition whose records before the offset are deleted. -1 is the end of the log."""

    partition: Int32
    offset: Int64


class DeleteRecordsTopic(NamedTuple):
    """Partitions of a topic whose records are deleted."""

    name: String
    partitions: tuple[DeleteRecordsPartition, ...]


class DeleteRecordsRequest(NamedTuple):
    """DeleteRecords request (API key 21): partitions with the offsets before which records are deleted."""

    topics: tuple[DeleteRecordsTopic, ...]
    timeout_ms: Int32


class CutPartition(NamedTuple):
    """Result of deleting records: the first remaining offset of a partition, -1 with an error."""

    partition: Int32
    low_watermark: Int64
    error_code: Int16


class CutTopic(NamedTuple):
    """Results of deleting records, for the partitions of a topic."""

    name: String
    partitions: tuple[CutPartition, ...]


class DeleteRecordsResponse(NamedTuple):
    """DeleteRecords response (API key 21): first remaining offset of each partition."""

    throttle_time_ms: Int32
    topics: tuple[CutTopic, ...]


class LogDirTopic(NamedTuple):
    """Partitions of a topic whose sizes are requested."""

    name: String
    partitions: tuple[Int32, ...]


class DescribeLogDirsRequest(NamedTuple):
    """DescribeLogDirs request (API key 35). None requests all topics."""

    topics: tuple[LogDirTopic, ...] | None


class LogDirPartition(NamedTuple):
    """Entry of a DescribeLogDirs response: the bytes that the record batches of one partition occupy on disk."""

    partition: Int32
    size_bytes: Int64
    offset_lag: Int64
    is_future: Bool


class MeasuredTopic(NamedTuple):
    """Sizes of the partitions of a topic."""

    name: String
    partitions: tuple[LogDirPartition, ...]


class LogDir(NamedTuple):
    """Folder with logs. There is only one."""

    error_code: Int16
    path: String
    topics: tuple[MeasuredTopic, ...]


class DescribeLogDirsResponse(NamedTuple):
    """DescribeLogDirs response (API key 35): sizes of partitions."""

    throttle_time_ms: Int32
    dirs: tuple[LogDir, ...]
