"""Table of the supported APIs with their versions, handlers and error responses.

For each API the broker announces a range of versions, of which a client chooses the newest that it supports. Most APIs
support only the end of this range; some support all versions from `oldest` on. A few ranges begin below the oldest
supported version: librdkafka before 2.1 (Debian's kcat) disables record batches, consumer groups and lz4 unless the
range contains the version in which each appeared first, although it never sends that version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.handlers import fetch, groups, metadata, topics, transactions
from headrace_broker.protocol import fetch as fetch_messages
from headrace_broker.protocol import groups as group_messages
from headrace_broker.protocol import metadata as metadata_messages
from headrace_broker.protocol import topics as topic_messages
from headrace_broker.protocol import transactions as transaction_messages
from headrace_broker.protocol.metadata import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    RequestHeader,
    RequestStart,
)
from headrace_broker.wire import PLAIN, Form, WireReader, codec, decode, encode, skip_tagged

SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
BEFORE_LOGIN = frozenset((SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE))
"""APIs that a connection may use before it is authenticated."""


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """One API of the protocol, with its supported versions and its handler.

    `refuse` builds the response for an exception `Rejected`. If it is None, the handler must not raise `Rejected`.
    """

    name: str
    key: int
    version: int
    """Newest supported version."""
    request: type[Any]
    handle: Callable[[Broker, RequestContext, Any], Awaitable[Any]]
    refuse: Callable[[Any, Code], Any] | None = None
    announced_from: int | None = None
    """Lowest announced version, if it is below the oldest supported one."""
    oldest: int | None = None
    """Oldest supported version; None if only `version` is supported."""
    flexible_from: int = 1000
    """First version with compact lengths and tagged fields."""

    @property
    def supported_versions(self) -> range:
        """Versions that the broker supports."""
        return range(self.version if self.oldest is None else self.oldest, self.version + 1)

    def form(self, version: int) -> Form:
        """Return the encoding of this API's messages in a version."""
        return Form(version, version >= self.flexible_from)


async def _api_versions(broker: Broker, call: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    return api_versions_response(Code.NONE)


def _refuse_join(request: group_messages.JoinGroupRequest, code: Code) -> group_messages.JoinGroupResponse:
    return group_messages.JoinGroupResponse(0, code, -1, "", "", request.member_id, ())


APIS = (
    ApiSpec("Produce", 0, 7, fetch_messages.ProduceRequest, fetch.produce, announced_from=3),
    ApiSpec("Fetch", 1, 11, fetch_messages.FetchRequest, fetch.fetch, announced_from=4),
    ApiSpec("ListOffsets", 2, 2, fetch_messages.ListOffsetsRequest, fetch.list_offsets, announced_from=1),
    ApiSpec("Metadata", 3, 4, metadata_messages.MetadataRequest, metadata.metadata),
    ApiSpec("OffsetCommit", 8, 3, group_messages.OffsetCommitRequest, groups.offset_commit, announced_from=2),
    ApiSpec(
        "OffsetFetch", 9, 7, group_messages.OffsetFetchRequest, groups.offset_fetch,
        lambda _, code: group_messages.OffsetFetchResponse(0, (), code), oldest=1, flexible_from=6,
    ),
    ApiSpec(
        "FindCoordinator", 10, 1, metadata_messages.FindCoordinatorRequest, metadata.find_coordinator,
        lambda _, code: metadata_messages.FindCoordinatorResponse(0, code, code.name, -1, "", -1), announced_from=0,
    ),
    ApiSpec("JoinGroup", 11, 5, group_messages.JoinGroupRequest, groups.join_group, _refuse_join, announced_from=0),
    ApiSpec(
        "Heartbeat", 12, 1, group_messages.HeartbeatRequest, groups.heartbeat,
        lambda _, code: group_messages.HeartbeatResponse(0, code), announced_from=0,
    ),
    ApiSpec(
        "LeaveGroup", 13, 1, group_messages.LeaveGroupRequest, groups.leave_group,
        lambda _, code: group_messages.LeaveGroupResponse(0, code), announced_from=0,
    ),
    ApiSpec(
        "SyncGroup", 14, 3, group_messages.SyncGroupRequest, groups.sync_group,
        lambda _, code: group_messages.SyncGroupResponse(0, code, b""), announced_from=0,
    ),
    ApiSpec("DescribeGroups", 15, 2, group_messages.DescribeGroupsRequest, groups.describe_groups),
    ApiSpec("ListGroups", 16, 1, group_messages.ListGroupsRequest, groups.list_groups),
    ApiSpec(
        "SaslHandshake", SASL_HANDSHAKE, 1, metadata_messages.SaslHandshakeRequest, metadata.handshake,
        announced_from=0,
    ),
    ApiSpec("ApiVersions", API_VERSIONS, 0, ApiVersionsRequest, _api_versions),
    ApiSpec("CreateTopics", 19, 4, topic_messages.CreateTopicsRequest, topics.create_topics, oldest=3),
    ApiSpec("DeleteTopics", 20, 1, topic_messages.DeleteTopicsRequest, topics.delete_topics),
    ApiSpec("DeleteRecords", 21, 1, topic_messages.DeleteRecordsRequest, topics.delete_records, oldest=0),
    ApiSpec(
        "InitProducerId", 22, 4, fetch_messages.InitProducerIdRequest, fetch.init_producer_id,
        lambda _, code: fetch_messages.InitProducerIdResponse(0, code, -1, -1), oldest=0, flexible_from=2,
    ),
    ApiSpec("AddPartitionsToTxn", 24, 0, transaction_messages.AddPartitionsToTxnRequest, transactions.add_partitions),
    ApiSpec(
        "AddOffsetsToTxn", 25, 0, transaction_messages.AddOffsetsToTxnRequest, transactions.add_offsets,
        lambda _, code: transaction_messages.AddOffsetsToTxnResponse(0, code),
    ),
    ApiSpec(
        "EndTxn", 26, 0, transaction_messages.EndTxnRequest, transactions.end_txn,
        lambda _, code: transaction_messages.EndTxnResponse(0, code),
    ),
    ApiSpec(
        "TxnOffsetCommit", 28, 3, transaction_messages.TxnOffsetCommitRequest, transactions.txn_offset_commit,
        oldest=0, flexible_from=3,
    ),
    ApiSpec("DescribeConfigs", 32, 1, topic_messages.DescribeConfigsRequest, topics.describe_configs),
    ApiSpec("DescribeLogDirs", 35, 1, topic_messages.DescribeLogDirsRequest, topics.describe_log_dirs),
    ApiSpec(
        "SaslAuthenticate", SASL_AUTHENTICATE, 1, metadata_messages.SaslAuthenticateRequest,
        metadata.authenticate, oldest=0,
    ),
    ApiSpec("CreatePartitions", 37, 1, topic_messages.CreatePartitionsRequest, topics.create_partitions, oldest=0),
    ApiSpec("DeleteGroups", 42, 1, group_messages.DeleteGroupsRequest, groups.delete_groups),
    ApiSpec("IncrementalAlterConfigs", 44, 0, topic_messages.IncrementalAlterConfigsRequest, topics.alter_configs),
    ApiSpec(
        "DescribeProducers", 61, 0, transaction_messages.DescribeProducersRequest,
        transactions.describe_producers, flexible_from=0,
    ),
    ApiSpec(
        "DescribeTransactions", 65, 0, transaction_messages.DescribeTransactionsRequest,
        transactions.describe_transactions, flexible_from=0,
    ),
    ApiSpec(
        "ListTransactions", 66, 1, transaction_messages.ListTransactionsRequest,
        transactions.list_transactions, oldest=0, flexible_from=0,
    ),
    ApiSpec(
        "ConsumerGroupHeartbeat", 68, 1, group_messages.ConsumerGroupHeartbeatRequest,
        groups.consumer_group_heartbeat, oldest=0, flexible_from=0,
    ),
)  # fmt: skip
_BY_KEY = {api.key: api for api in APIS}


class DecodedRequest(NamedTuple):
    """A decoded request. If its version of ApiVersions is not supported, `api` is None, and the response is an error
    with the list of APIs."""

    correlation_id: int
    client_id: str
    api: ApiSpec | None
    message: Any
    form: Form = PLAIN


def api_versions_response(code: Code) -> ApiVersionsResponse:
    """Build the ApiVersions response: all APIs with their versions, and an error code.

    Kafka's clients can parse this version of it also after UNSUPPORTED_VERSION, and then send a supported version.
    """
    return ApiVersionsResponse(
        code,
        tuple(
            ApiVersion(
                api.key, api.supported_versions.start if api.announced_from is None else api.announced_from, api.version
            )
            for api in APIS
        ),
    )


def parse(frame: bytes) -> DecodedRequest:
    """Decode a request. Raises `Malformed`, also for an unsupported version, because its response could not be
    encoded."""
    start = codec(RequestStart).read(WireReader(frame))
    api = _BY_KEY.get(start.api_key)
    if api is None or start.api_version not in api.supported_versions:
        if start.api_key == API_VERSIONS:
            return DecodedRequest(start.correlation_id, "", None, None)
        raise Malformed(f"API {start.api_key} version {start.api_version} is not supported")
    source = WireReader(frame)
    header = codec(RequestHeader).read(source)
    form = api.form(header.api_version)
    if form.flexible:
        skip_tagged(source)
    message = decode(api.request, source, form)
    return DecodedRequest(header.correlation_id, header.client_id or "", api, message, form)


def encode_response(request: DecodedRequest, response: Any, sink: bytearray) -> None:
    """Append the response to `sink`, in the version of its request."""
    if request.form.flexible:
        sink.append(0)  # the header's tagged fields
    encode(response, sink, request.form)


async def respond(broker: Broker, call: RequestContext, request: DecodedRequest) -> Any:
    """Call the handler of a request and return its response, or None if the client expects no response."""
    api = request.api
    if api is None:
        return api_versions_response(Code.UNSUPPORTED_VERSION)
    try:
        return await api.handle(broker, call, request.message)
    except Rejected as error:
        if api.refuse is None:
            raise
        broker.stats.errors[error.code] += 1
        return api.refuse(request.message, error.code)
