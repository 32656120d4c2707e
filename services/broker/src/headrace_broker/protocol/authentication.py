"""SaslHandshake 0 and 1, SaslAuthenticate 0 and 1."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bytes, Int16, Int64, NullableString, Since, String


class SaslHandshakeRequest(NamedTuple):
    """Request with API key 17."""

    mechanism: String


class SaslHandshakeResponse(NamedTuple):
    """Response for API key 17."""

    error_code: Int16
    mechanisms: tuple[String, ...]


class SaslAuthenticateRequest(NamedTuple):
    """Request with API key 36."""

    auth_bytes: Bytes


class SaslAuthenticateResponse(NamedTuple):
    """Response for API key 36. With the lifetime 0 a session ends with its connection."""

    error_code: Int16
    error_message: NullableString
    auth_bytes: Bytes
    session_lifetime_ms: Annotated[Int64, Since(1, 0)]
