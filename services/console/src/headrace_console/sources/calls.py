"""HTTP calls to other services. An error response of a service is raised as `Refused` with the same status."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping

import httpx2

from headrace_runtime.errors import Refused
from headrace_schemas.values.text import printable

_TIMEOUT_S = 10.0


def bearer(key: str) -> dict[str, str]:
    """Return the headers that authenticate a request, none without a key."""
    return {"authorization": f"Bearer {key}"} if key else {}


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context of all clients. It is shared, because loading its certificates takes 25 ms."""
    return httpx2.create_ssl_context(trust_env=False)


def open_client(timeout_s: float, headers: Mapping[str, str] | None = None) -> httpx2.AsyncClient:
    """Open an HTTP client for other services. The caller must close it."""
    return httpx2.AsyncClient(timeout=timeout_s, trust_env=False, headers=dict(headers or {}), verify=_tls())


async def call(
    service: str,
    method: str,
    url: str,
    headers: Mapping[str, str],
    content: bytes = b"",
    *,
    timeout_s: float = _TIMEOUT_S,
) -> bytes:
    """Send a request to a service, and return the body of its answer.

    Raises:
        Refused: the service refuses the request, with its message, or it does not answer (503).
    """
    try:
        async with open_client(timeout_s) as client:
            reply = await client.request(method, url, headers=dict(headers), content=content)
    except (httpx2.HTTPError, OSError) as error:
        problem = f"The {service} does not answer at {url.partition('/v1/')[0]} ({type(error).__name__})."
        raise Refused(503, f"{service}_away", problem) from None
    if reply.status_code >= 400:
        raise Refused(reply.status_code, service, f"The {service} refuses this: {_message(reply)}")
    return reply.content


def _message(reply: httpx2.Response) -> str:
    try:
        return printable(str(reply.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"status {reply.status_code}"
