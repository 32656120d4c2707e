"""ApiVersions 0, and the header of all requests."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int16, Int32, NullableString


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
    """Request with API key 18."""


class ApiVersion(NamedTuple):
    """Range of supported versions of one API."""

    api_key: Int16
    min_version: Int16
    max_version: Int16


class ApiVersionsResponse(NamedTuple):
    """Response for API key 18, also of unsupported versions."""

    error_code: Int16
    api_keys: tuple[ApiVersion, ...]
