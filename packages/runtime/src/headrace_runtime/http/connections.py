"""Limits on the open connections of a server, and on the bytes of responses that clients have not read yet.

A client without a key could otherwise hold all file descriptors with idle connections, or the memory with responses
that it does not read.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.types import Scope

from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)
UNREAD_BYTES_MAX = 256 << 20
"""Maximum number of unread bytes of all responses of a server together. One response of a gateway has up to 64 MiB."""
_CONNECTIONS_MIN, _CONNECTIONS_MAX = 64, 16_384
_AUTHENTICATED = "headrace.authenticated"


class Connection(Protocol):
    """Connection that `ConnectionLimits` may close."""

    def abort(self) -> None:
        """Close the connection at once."""


class ConnectionLimits:
    """Set of the open connections of one server, which decides which of them are closed when a limit is reached."""

    def __init__(self) -> None:
        self.connections_max = connections_max()
        self._open: set[Connection] = set()
        self._idle: tuple[dict[Connection, None], dict[Connection, None]] = ({}, {})
        """Idle connections of clients without and with a key, in the order in which they became idle."""
        self._unread: dict[Connection, int] = {}
        """Bytes that wait for the client, by connection, in the order in which the clients stopped reading."""
        self._unread_bytes = 0
        self._is_logged = False

    def open(self, connection: Connection) -> bool:
        """Register a new connection, and return whether it may stay open.

        At the limit another connection is closed for it. Idle connections whose client sent no valid key come first,
        then other idle ones, then those whose client does not read its response; in each group the one that has waited
        longest. If there is none of these, the result is False.
        """
        if len(self._open) >= self.connections_max:
            candidates = next((connections for connections in (*self._idle, self._unread) if connections), None)
            if not self._is_logged:
                self._is_logged = True
                remedy = "close idle connections, or raise the limit of file descriptors (ulimit -n, LimitNOFILE=)"
                log.warning("connections_at_limit", connections_max=self.connections_max, remedy=remedy)
            if candidates is None:
                return False
            self._abort(next(iter(candidates)))
        self._open.add(connection)
        return True

    def rest(self, connection: Connection, *, has_key: bool) -> None:
        """Record that a connection is idle: it waits for a request of its client."""
        if connection in self._open:
            self.resume(connection)
            self._idle[has_key][connection] = None

    def resume(self, connection: Connection) -> None:
        """Record that a connection has a request in progress, so it is not idle."""
        for connections in self._idle:
            connections.pop(connection, None)

    def hold(self, connection: Connection, unread_bytes: int) -> None:
        """Record that `unread_bytes` of a response wait for the client to read them.

        If the responses of all connections together exceed the limit, the connections that have waited longest are
        closed.
        """
        self.release(connection)
        while self._unread and self._unread_bytes + unread_bytes > UNREAD_BYTES_MAX:
            slowest = next(iter(self._unread))
            log.warning("response_given_up", reason="slow client", unread_bytes=self._unread[slowest])
            self._abort(slowest)
        self._unread[connection] = unread_bytes
        self._unread_bytes += unread_bytes

    def release(self, connection: Connection) -> None:
        """Record that the client has read the response on the connection."""
        self._unread_bytes -= self._unread.pop(connection, 0)

    def close(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        self.resume(connection)
        self.release(connection)

    def _abort(self, connection: Connection) -> None:
        self.close(connection)
        connection.abort()


def connections_max() -> int:
    """Return the maximum number of connections of a server: half the number of file descriptors of the process, within
    limits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    return min(max(soft // 2, _CONNECTIONS_MIN), _CONNECTIONS_MAX)


def mark_authenticated(scope: Scope) -> None:
    """Record that the request has a valid key. Connections without one are closed first when the limit is reached."""
    scope.setdefault("state", {})[_AUTHENTICATED] = True


def is_authenticated(scope: Mapping[str, Any]) -> bool:
    """Return whether `mark_authenticated` was called for the request."""
    return _AUTHENTICATED in scope.get("state", {})
