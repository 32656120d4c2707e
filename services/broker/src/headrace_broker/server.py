"""The Kafka port: accepts connections up to a bound and ends them with the server."""

from __future__ import annotations

import asyncio
import socket

from headrace_broker.broker import Broker
from headrace_broker.budget import MemoryBudget
from headrace_broker.connection import Connection
from headrace_runtime.logs import get_logger

log = get_logger(__name__)


class Server:
    """`serve` accepts on a bound socket; `close` drops all connections and returns when none is left."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._memory = MemoryBudget(broker.settings.requests_bytes_max)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def request_bytes(self) -> int:
        """Memory that requests hold now."""
        return self._memory.used

    async def serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def close(self) -> None:
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


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `OSError` when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # without its protocol asyncio would not know what it accepts for TCP, and small answers would wait for more (Nagle)
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
