"""Listening socket of a service, owned by the supervisor so that it stays open while the service restarts.

A client that connects while the gateway restarts waits for the new process instead of being refused. Together with the
usual retries of clients, a killed gateway causes only a delay. The socket is passed as in sd_listen_fds(3) of systemd.
"""

from __future__ import annotations

import contextlib
import socket

_BACKLOG = 2048


class ListeningSocket:
    """A listening socket. `open` it before each start of the service, `close` it before the service stops for good."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._listener: socket.socket | None = None

    def open(self) -> int | None:
        """Open the socket if it is not open, and return its file descriptor.

        Returns:
            None if the address is not available; the service reports the reason when it binds the address itself.
        """
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        return self._listener.fileno() if self._listener else None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
