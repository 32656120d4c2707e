"""First requests of a connection, and the header of all requests.

ApiVersions 0, SaslHandshake 0 and 1, SaslAuthenticate 0 and 1, Metadata 4, FindCoordinator 1.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bool, Bytes, Int8, Int16, Int32, Int64, NullableString, Since, String


class MetadataRequest(NamedTuple):
    """Metadata request (API key 3). None requests all topics, an empty list none."""

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
    """Metadata response (API key 3): addresses of brokers, and topics with their partitions."""

    throttle_time_ms: Int32
    brokers: tuple[BrokerMetadata, ...]
    cluster_id: NullableString
    controller_id: Int32
    topics: tuple[TopicMetadata, ...]


class FindCoordinatorRequest(NamedTuple):
    """FindCoordinator request (API key 10). `key_type` 0 is a consumer group, 1 a transactional id."""

    key: String
    key_type: Int8


class FindCoordinatorResponse(NamedTuple):
    """FindCoordinator response (API key 10). The coordinator is always this broker."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: NullableString
    node_id: Int32
    host: String
    port: Int32


class RequestStart(NamedTuple):
    """Part of the request header that is equal in all versions."""

    api_key: Int16
    api_version: Int16
    correlation_id: Int32


class RequestHeader(NamedTuple):
    """Request header of version 1, for non-flexible versions of requests."""

    api_key: Int16
    api_version: Int16
    correlation_id: Int32
    client_id: NullableString


class ApiVersionsRequest(NamedTuple):
    """ApiVersions request (API key 18): the supported APIs."""


class ApiVersion(NamedTuple):
    """Range of supported versions of one API."""

    api_key: Int16
    min_version: Int16
    max_version: Int16


class ApiVersionsResponse(NamedTuple):
    """ApiVersions response (API key 18): ranges of versions, also for unsupported requests."""

    error_code: Int16
    api_keys: tuple[ApiVersion, ...]


class SaslHandshakeRequest(NamedTuple):
    """SaslHandshake request (API key 17): the mechanism that the client chooses."""

    mechanism: String


class SaslHandshakeResponse(NamedTuple):
    """SaslHandshake response (API key 17): the supported mechanisms."""

    error_code: Int16
    mechanisms: tuple[String, ...]


class SaslAuthenticateRequest(NamedTuple):
    """SaslAuthenticate request (API key 36): user name and password in the form of the mechanism."""

    auth_bytes: Bytes


class SaslAuthenticateResponse(NamedTuple):
    """SaslAuthenticate response (API key 36). With the lifetime 0 a session ends with its connection."""

    error_code: Int16
    error_message: NullableString
    auth_bytes: Bytes
    session_lifetime_ms: Annotated[Int64, Since(1, 0)]
