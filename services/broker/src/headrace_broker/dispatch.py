"""The supported requests: the versions of each, its handler, and the form of a refusal.

The announced range ends at the newest served version, which clients choose when they know it. Most APIs are served in
this version alone; where clients need others, in all from `oldest` on. A few announced ranges begin below the oldest
served version: librdkafka before 2.1 (Debian's kcat) switches record batches, consumer groups and lz4 off unless the
range holds the version in which each first appeared, although it never sends that version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Malformed, Rejected
from headrace_broker.handlers import (
    admin,
    authentication,
    fetch,
    groups,
    list_offsets,
    metadata,
    offsets,
    produce,
    topics,
    transaction_admin,
    transactions,
)
from headrace_broker.protocol import authentication as authentication_messages
from headrace_broker.protocol import fetch as fetch_messages
from headrace_broker.protocol import groups as group_messages
from headrace_broker.protocol import metadata as metadata_messages
from headrace_broker.protocol import offsets as offset_messages
from headrace_broker.protocol import produce as produce_messages
from headrace_broker.protocol import topics as topic_messages
from headrace_broker.protocol import transactions as transaction_messages
from headrace_broker.protocol.versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    RequestHeader,
    RequestStart,
)
from headrace_broker.wire import PLAIN, Form, WireReader, codec, decode, encode, skip_tagged

SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
BEFORE_LOGIN = frozenset((SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE))
"""What a connection may send before it has authenticated."""


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """One request type. `refuse` makes the response for a `Rejected`; handlers without it answer for themselves."""

    name: str
    key: int
    version: int
    """The newest that is served."""
    request: type[Any]
    handle: Callable[[Broker, RequestContext, Any], Awaitable[Any]]
    refuse: Callable[[Any, Code], Any] | None = None
    announced_from: int | None = None
    """Low end of the announced range, when nothing so old is served."""
    oldest: int | None = None
    """The oldest that is served, when it is not `version`."""
    flexible_from: int = 1000

    @property
    def served(self) -> range:
        return range(self.version if self.oldest is None else self.oldest, self.version + 1)

    def form(self, version: int) -> Form:
        return Form(version, version >= self.flexible_from)


async def _api_versions(broker: Broker, call: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    return announced(Code.NONE)


def _refuse_join(request: group_messages.JoinGroupRequest, code: Code) -> group_messages.JoinGroupResponse:
    return group_messages.JoinGroupResponse(0, code, -1, "", "", request.member_id, ())


APIS = (
    ApiSpec("Produce", 0, 7, produce_messages.ProduceRequest, produce.produce, announced_from=3),
    ApiSpec("Fetch", 1, 11, fetch_messages.FetchRequest, fetch.fetch, announced_from=4),
    ApiSpec("ListOffsets", 2, 2, fetch_messages.ListOffsetsRequest, list_offsets.list_offsets, announced_from=1),
    ApiSpec("Metadata", 3, 4, metadata_messages.MetadataRequest, metadata.metadata),
    ApiSpec("OffsetCommit", 8, 3, offset_messages.OffsetCommitRequest, offsets.offset_commit, announced_from=2),
    ApiSpec(
        "OffsetFetch", 9, 7, offset_messages.OffsetFetchRequest, offsets.offset_fetch,
        lambda _, code: offset_messages.OffsetFetchResponse(0, (), code), oldest=1, flexible_from=6,
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
        "SaslHandshake", SASL_HANDSHAKE, 1, authentication_messages.SaslHandshakeRequest, authentication.handshake,
        announced_from=0,
    ),
    ApiSpec("ApiVersions", API_VERSIONS, 0, ApiVersionsRequest, _api_versions),
    ApiSpec("CreateTopics", 19, 4, topic_messages.CreateTopicsRequest, topics.create_topics, oldest=3),
    ApiSpec("DeleteTopics", 20, 1, topic_messages.DeleteTopicsRequest, topics.delete_topics),
    ApiSpec("DeleteRecords", 21, 1, topic_messages.DeleteRecordsRequest, admin.delete_records, oldest=0),
    ApiSpec(
        "InitProducerId", 22, 4, produce_messages.InitProducerIdRequest, produce.init_producer_id,
        lambda _, code: produce_messages.InitProducerIdResponse(0, code, -1, -1), oldest=0, flexible_from=2,
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
    ApiSpec("DescribeLogDirs", 35, 1, topic_messages.DescribeLogDirsRequest, admin.describe_log_dirs),
    ApiSpec(
        "SaslAuthenticate", SASL_AUTHENTICATE, 1, authentication_messages.SaslAuthenticateRequest,
        authentication.authenticate, oldest=0,
    ),
    ApiSpec("CreatePartitions", 37, 1, topic_messages.CreatePartitionsRequest, admin.create_partitions, oldest=0),
    ApiSpec("DeleteGroups", 42, 1, group_messages.DeleteGroupsRequest, groups.delete_groups),
    ApiSpec("IncrementalAlterConfigs", 44, 0, topic_messages.IncrementalAlterConfigsRequest, admin.alter_configs),
    ApiSpec(
        "DescribeProducers", 61, 0, transaction_messages.DescribeProducersRequest,
        transaction_admin.describe_producers, flexible_from=0,
    ),
    ApiSpec(
        "DescribeTransactions", 65, 0, transaction_messages.DescribeTransactionsRequest,
        transaction_admin.describe_transactions, flexible_from=0,
    ),
    ApiSpec(
        "ListTransactions", 66, 1, transaction_messages.ListTransactionsRequest,
        transaction_admin.list_transactions, oldest=0, flexible_from=0,
    ),
    ApiSpec(
        "ConsumerGroupHeartbeat", 68, 1, group_messages.ConsumerGroupHeartbeatRequest,
        groups.consumer_group_heartbeat, oldest=0, flexible_from=0,
    ),
)  # fmt: skip
_BY_KEY = {api.key: api for api in APIS}


class DecodedRequest(NamedTuple):
    """A decoded request. `api` is None for an ApiVersions of another version, which gets the list and an error."""

    correlation_id: int
    client_id: str
    api: ApiSpec | None
    message: Any
    form: Form = PLAIN


def announced(code: Code) -> ApiVersionsResponse:
    """What we serve. Kafka's clients read this form after UNSUPPORTED_VERSION too, and ask again."""
    return ApiVersionsResponse(
        code,
        tuple(
            ApiVersion(api.key, api.served.start if api.announced_from is None else api.announced_from, api.version)
            for api in APIS
        ),
    )


def parse(frame: bytes) -> DecodedRequest:
    """Raises `Malformed`, also for a version that is not served: the form of its answer is unknown, as in Kafka."""
    start = codec(RequestStart).read(WireReader(frame))
    api = _BY_KEY.get(start.api_key)
    if api is None or start.api_version not in api.served:
        if start.api_key == API_VERSIONS:
            return DecodedRequest(start.correlation_id, "", None, None)
        raise Malformed(f"API {start.api_key} version {start.api_version} is not served")
    source = WireReader(frame)
    header = codec(RequestHeader).read(source)
    form = api.form(header.api_version)
    if form.flexible:
        skip_tagged(source)
    message = decode(api.request, source, form)
    return DecodedRequest(header.correlation_id, header.client_id or "", api, message, form)


def encode_response(request: DecodedRequest, response: Any, sink: bytearray) -> None:
    """Append the response in the version of its request."""
    if request.form.flexible:
        sink.append(0)  # the header's tagged fields
    encode(response, sink, request.form)


async def respond(broker: Broker, call: RequestContext, request: DecodedRequest) -> Any:
    """The response message, None when the client wants none."""
    api = request.api
    if api is None:
        return announced(Code.UNSUPPORTED_VERSION)
    try:
        return await api.handle(broker, call, request.message)
    except Rejected as error:
        if api.refuse is None:
            raise
        broker.stats.errors[error.code] += 1
        return api.refuse(request.message, error.code)
