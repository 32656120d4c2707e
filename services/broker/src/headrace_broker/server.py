"""Server on the Kafka port, with a bounded number of connections."""

from __future__ import annotations

import asyncio
import socket

from headrace_broker.broker import Broker
from headrace_broker.budget import MemoryBudget
from headrace_broker.connection import Connection
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)


class Server:
    """Kafka server of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._memory = MemoryBudget(broker.settings.requests_bytes_max)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def request_bytes(self) -> int:
        """Memory of requests in progress."""
        return self._memory.used

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket."""
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Stop accepting, close all connections and wait for their ends."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stats = self._broker.stats
        if len(self._connections) >= self._broker.settings.connections_max:
            stats.connections_refused += 1
            log.warning("connection_refused", reason="broker.connections_max is reached", open=len(self._connections))
            writer.transport.abort()
            return
        task = asyncio.create_task(Connection(self._broker, self._memory, reader, writer).run())
        self._connections.add(task)
        stats.connections += 1
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._broker.stats.connections -= 1


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `OSError` if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio disables Nagle's algorithm, which would delay small responses.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(128)
    listener.setblocking(False)
    return listener
