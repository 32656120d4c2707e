"""Metadata 4 and FindCoordinator 1."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Bool, Int8, Int16, Int32, NullableString, String


class MetadataRequest(NamedTuple):
    """Key 3. No list asks for all topics, an empty one for none."""

    topics: tuple[String, ...] | None
    allow_auto_topic_creation: Bool


class BrokerMetadata(NamedTuple):
    """Where to connect."""

    node_id: Int32
    host: String
    port: Int32
    rack: NullableString


class PartitionMetadata(NamedTuple):
    """Leader and replicas; here always the one broker."""

    error_code: Int16
    partition: Int32
    leader_id: Int32
    replicas: tuple[Int32, ...]
    in_sync_replicas: tuple[Int32, ...]


class TopicMetadata(NamedTuple):
    """A topic, or why there is none of that name."""

    error_code: Int16
    name: String
    is_internal: Bool
    partitions: tuple[PartitionMetadata, ...]


class MetadataResponse(NamedTuple):
    """Answers key 3."""

    throttle_time_ms: Int32
    brokers: tuple[BrokerMetadata, ...]
    cluster_id: NullableString
    controller_id: Int32
    topics: tuple[TopicMetadata, ...]


class FindCoordinatorRequest(NamedTuple):
    """Key 10. `key_type` 0 is a consumer group, 1 a transactional id."""

    key: String
    key_type: Int8


class FindCoordinatorResponse(NamedTuple):
    """Answers key 10; here always with the one broker."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: NullableString
    node_id: Int32
    host: String
    port: Int32
