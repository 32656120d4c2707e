"""ApiVersions 0, and the header that all requests have."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int16, Int32, NullableString


class RequestStart(NamedTuple):
    """The part of a header that is the same in every version, flexible ones included."""

    api_key: Int16
    api_version: Int16
    correlation_id: Int32


class RequestHeader(NamedTuple):
    """Version 1: what precedes every request of a non-flexible version."""

    api_key: Int16
    api_version: Int16
    correlation_id: Int32
    client_id: NullableString


class ApiVersionsRequest(NamedTuple):
    """Key 18."""


class ApiVersion(NamedTuple):
    """The versions of one API that a client may choose from."""

    api_key: Int16
    min_version: Int16
    max_version: Int16


class ApiVersionsResponse(NamedTuple):
    """Answers key 18, also in versions that are not served."""

    error_code: Int16
    api_keys: tuple[ApiVersion, ...]
