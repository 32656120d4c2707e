"""Messages at the beginning of a connection, and the header of all requests.

ApiVersions 0, SaslHandshake 0 and 1, SaslAuthenticate 0 and 1, Metadata 4, FindCoordinator 1.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bool, Bytes, Int8, Int16, Int32, Int64, NullableString, Since, String


class MetadataRequest(NamedTuple):
    """Metadata request (API key 3). `topics` None requests all topics, an empty list no topics."""

    topics: tuple[String, ...] | None
    allow_auto_topic_creation: Bool


class BrokerMetadata(NamedTuple):
    """Address of a broker."""

    node_id: Int32
    host: String
    port: Int32
    rack: NullableString


class PartitionMetadata(NamedTuple):
    """Leader and replicas of a partition. All are this broker."""

    error_code: Int16
    partition: Int32
    leader_id: Int32
    replicas: tuple[Int32, ...]
    in_sync_replicas: tuple[Int32, ...]


class TopicMetadata(NamedTuple):
    """Partitions of a topic, or an error code if there is no such topic."""

    error_code: Int16
    name: String
    is_internal: Bool
    partitions: tuple[PartitionMetadata, ...]


class MetadataResponse(NamedTuple):
    """Metadata response (API key 3) with the broker's address, and topics with their partitions."""

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
    """FindCoordinator response (API key 10) with the address of the coordinator, which is always this broker."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: NullableString
    node_id: Int32
    host: String
    port: Int32


class RequestStart(NamedTuple):
    """Beginning of the request header, which is equal in all versions of the header."""

    api_key: Int16
    api_version: Int16
    correlation_id: Int32


class RequestHeader(NamedTuple):
    """Request header of version 1, for requests of non-flexible versions."""

    api_key: Int16
    api_version: Int16
    correlation_id: Int32
    client_id: NullableString


class ApiVersionsRequest(NamedTuple):
    """ApiVersions request (API key 18) for the supported APIs and versions. It has no fields."""


class ApiVersion(NamedTuple):
    """Range of the supported versions of one API."""

    api_key: Int16
    min_version: Int16
    max_version: Int16


class ApiVersionsResponse(NamedTuple):
    """ApiVersions response (API key 18) with the supported APIs. It is also the response to an unsupported version of
    the request."""

    error_code: Int16
    api_keys: tuple[ApiVersion, ...]


class SaslHandshakeRequest(NamedTuple):
    """SaslHandshake request (API key 17) with the SASL mechanism that the client chooses."""

    mechanism: String


class SaslHandshakeResponse(NamedTuple):
    """SaslHandshake response (API key 17) with the supported SASL mechanisms."""

    error_code: Int16
    mechanisms: tuple[String, ...]


class SaslAuthenticateRequest(NamedTuple):
    """SaslAuthenticate request (API key 36) with user name and password, in the format of the SASL mechanism."""

    auth_bytes: Bytes


class SaslAuthenticateResponse(NamedTuple):
    """SaslAuthenticate response (API key 36). `session_lifetime_ms` 0 means that the login is valid as long as the
    connection."""

    error_code: Int16
    error_message: NullableString
    auth_bytes: Bytes
    session_lifetime_ms: Annotated[Int64, Since(1, 0)]
