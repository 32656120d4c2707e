"""Handlers of SASL: a client chooses PLAIN, and then sends the user name and the password of the bus."""

from __future__ import annotations

from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code
from headrace_broker.login import MECHANISM
from headrace_broker.protocol.authentication import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)


async def handshake(_broker: Broker, call: RequestContext, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    """Handle SaslHandshake."""
    call.login.agreed = request.mechanism == MECHANISM
    code = Code.NONE if call.login.agreed else Code.UNSUPPORTED_SASL_MECHANISM
    return SaslHandshakeResponse(code, (MECHANISM,))


async def authenticate(
    broker: Broker, call: RequestContext, request: SaslAuthenticateRequest
) -> SaslAuthenticateResponse:
    """Handle SaslAuthenticate."""
    if not call.login.agreed:
        call.login.refused = True
        return SaslAuthenticateResponse(Code.ILLEGAL_SASL_STATE, "send SaslHandshake with PLAIN first", b"", 0)
    if call.login.authenticate(request.auth_bytes):
        return SaslAuthenticateResponse(Code.NONE, None, b"", 0)
    broker.stats.errors[Code.SASL_AUTHENTICATION_FAILED] += 1
    log.warning("login_refused", client=call.client_host)
    problem = "wrong user name or password; clients need bus.username and bus.password of the broker's settings"
    return SaslAuthenticateResponse(Code.SASL_AUTHENTICATION_FAILED, problem, b"", 0)
