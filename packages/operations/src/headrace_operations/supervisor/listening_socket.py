"""The listening socket of a service. The supervisor holds it, so that it stays open when the service restarts.

Whoever calls between two lives of the gateway then waits for the next one instead of being refused, which together with
the usual retry of a client makes a killed gateway a pause. Handed over as systemd does it: sd_listen_fds(3).
"""

from __future__ import annotations

import contextlib
import socket

_BACKLOG = 2048


class ListeningSocket:
    """`open` it before each start (again is harmless), `close` it when the service is to stop for good."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._listener: socket.socket | None = None

    def open(self) -> int | None:
        """The file descriptor to hand over; None when the address cannot be had, which the service will tell better."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        return self._listener.fileno() if self._listener else None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
