"""SaslHandshake 0 and 1, SaslAuthenticate 0 and 1."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Bytes, Int16, Int64, NullableString, Since, String


class SaslHandshakeRequest(NamedTuple):
    """Key 17."""

    mechanism: String


class SaslHandshakeResponse(NamedTuple):
    """Answers key 17."""

    error_code: Int16
    mechanisms: tuple[String, ...]


class SaslAuthenticateRequest(NamedTuple):
    """Key 36."""

    auth_bytes: Bytes


class SaslAuthenticateResponse(NamedTuple):
    """Answers key 36. A session without a lifetime lasts as long as its connection."""

    error_code: Int16
    error_message: NullableString
    auth_bytes: Bytes
    session_lifetime_ms: Annotated[Int64, Since(1, 0)]
