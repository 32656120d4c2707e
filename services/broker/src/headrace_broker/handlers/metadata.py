"""Handlers of Metadata, FindCoordinator, SaslHandshake and SaslAuthenticate. The module `dispatch` handles ApiVersions.

A client first chooses the SASL mechanism PLAIN, and then sends the user name and the password of the bus.
"""

from __future__ import annotations

from headrace_broker.broker import MECHANISM, NODE_ID, Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.metadata import (
    BrokerMetadata,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
    TopicMetadata,
)
from headrace_broker.settings import KAFKA_HOST
from headrace_broker.topics import TopicState, check_name
from headrace_runtime.process.logs import get_logger

_GROUP, _TRANSACTION = 0, 1


async def metadata(broker: Broker, call: RequestContext, request: MetadataRequest) -> MetadataResponse:
    """Handle Metadata: return topics with their partitions. Topics are never created by it."""
    topics = broker.catalog.topics
    names = list(topics) if request.topics is None else request.topics
    return MetadataResponse(
        throttle_time_ms=0,
        brokers=(BrokerMetadata(NODE_ID, KAFKA_HOST, broker.port, None),),
        cluster_id=broker.cluster_id,
        controller_id=NODE_ID,
        topics=tuple(_topic(name, topics.get(name)) for name in names),
    )


async def find_coordinator(
    broker: Broker, call: RequestContext, request: FindCoordinatorRequest
) -> FindCoordinatorResponse:
    """Handle FindCoordinator: return the address of this broker, the only coordinator."""
    if request.key_type not in (_GROUP, _TRANSACTION):
        raise Rejected(Code.INVALID_REQUEST, f"coordinator type {request.key_type} is not supported")
    return FindCoordinatorResponse(0, Code.NONE, None, NODE_ID, KAFKA_HOST, broker.port)


def _topic(name: str, topic: TopicState | None) -> TopicMetadata:
    if topic is None:
        try:
            check_name(name)
        except Rejected as error:
            return TopicMetadata(error.code, name, False, ())
        return TopicMetadata(Code.UNKNOWN_TOPIC_OR_PARTITION, name, False, ())
    partitions = (
        PartitionMetadata(Code.NONE, view.number, NODE_ID, (NODE_ID,), (NODE_ID,)) for view in topic.partitions
    )
    return TopicMetadata(Code.NONE, name, False, tuple(partitions))


log = get_logger(__name__)


async def handshake(_broker: Broker, call: RequestContext, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    """Handle SaslHandshake: accept PLAIN as the mechanism, and refuse others."""
    call.login.agreed = request.mechanism == MECHANISM
    code = Code.NONE if call.login.agreed else Code.UNSUPPORTED_SASL_MECHANISM
    return SaslHandshakeResponse(code, (MECHANISM,))


async def authenticate(
    broker: Broker, call: RequestContext, request: SaslAuthenticateRequest
) -> SaslAuthenticateResponse:
    """Handle SaslAuthenticate: check the user name and the password of the connection."""
    if not call.login.agreed:
        call.login.refused = True
        return SaslAuthenticateResponse(Code.ILLEGAL_SASL_STATE, "send SaslHandshake with PLAIN first", b"", 0)
    if call.login.authenticate(request.auth_bytes):
        return SaslAuthenticateResponse(Code.NONE, None, b"", 0)
    broker.stats.errors[Code.SASL_AUTHENTICATION_FAILED] += 1
    log.warning("login_refused", client=call.client_host)
    problem = "wrong user name or password; clients need bus.username and bus.password of the broker's settings"
    return SaslAuthenticateResponse(Code.SASL_AUTHENTICATION_FAILED, problem, b"", 0)
