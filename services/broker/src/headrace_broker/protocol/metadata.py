"""Metadata 4 and FindCoordinator 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, NullableString, String


class MetadataRequest(NamedTuple):
    """Request with API key 3. None requests all topics, an empty list none."""

    topics: tuple[String, ...] | None
    allow_auto_topic_creation: Bool


class BrokerMetadata(NamedTuple):
    """Address of a broker."""

    node_id: Int32
    host: String
    port: Int32
    rack: NullableString


class PartitionMetadata(NamedTuple):
    """Leader and replicas of a partition, which are always this broker."""

    error_code: Int16
    partition: Int32
    leader_id: Int32
    replicas: tuple[Int32, ...]
    in_sync_replicas: tuple[Int32, ...]


class TopicMetadata(NamedTuple):
    """Description of a topic, or the error of its name."""

    error_code: Int16
    name: String
    is_internal: Bool
    partitions: tuple[PartitionMetadata, ...]


class MetadataResponse(NamedTuple):
    """Response for API key 3."""

    throttle_time_ms: Int32
    brokers: tuple[BrokerMetadata, ...]
    cluster_id: NullableString
    controller_id: Int32
    topics: tuple[TopicMetadata, ...]


class FindCoordinatorRequest(NamedTuple):
    """Request with API key 10. `key_type` 0 is a consumer group, 1 a transactional id."""

    key: String
    key_type: Int8


class FindCoordinatorResponse(NamedTuple):
    """Response for API key 10. The coordinator is always this broker."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: NullableString
    node_id: Int32
    host: String
    port: Int32
