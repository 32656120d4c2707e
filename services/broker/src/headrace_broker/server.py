"""Server for Kafka clients, with a limited number of connections.

Requests of a connection start in the order of arrival, run concurrently, and are answered in order.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from headrace_broker.broker import REQUEST_BYTES_MAX, Broker, Login, MemoryBudget, RequestContext
from headrace_broker.dispatch import BEFORE_LOGIN, DecodedRequest, encode_response, parse, respond
from headrace_broker.errors import Malformed
from headrace_runtime.process.logs import get_logger

CONNECTIONS_MAX = 512
"""Maximum number of connected clients. Further connections are refused."""
CONNECTION_REQUESTS_MAX = 32
"""Maximum number of concurrent requests of one connection. Further requests are not read from the socket yet."""
CONNECTION_IDLE_S = 600.0
"""Seconds without a request after which a connection is closed."""
TRANSFER_TIMEOUT_S = 30.0
"""Maximum seconds for receiving one request, and for sending one response."""
REQUESTS_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of all requests in progress. Further requests wait."""

_SIZE = struct.Struct(">i")
_RESPONSE_START = struct.Struct(">ii")
_BEFORE_LOGIN_BYTES_MAX = 65_536
"""Maximum size of a request before authentication, which suffices for a user name and a password."""


@dataclass(eq=False, slots=True)
class _Pending:
    """Request in progress, with the memory that it holds until its response is sent."""

    call: RequestContext
    request: DecodedRequest
    held_bytes: int
    task: asyncio.Task[Any]


class Connection:
    """Connection of one client.

    If the client disconnects, a write that was submitted is still completed, because the writer already has it.
    """

    def __init__(
        self, broker: Broker, memory: MemoryBudget, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._broker = broker
        self._memory = memory
        self._reader = reader
        self._writer = writer
        self._pending: asyncio.Queue[_Pending] = asyncio.Queue(CONNECTION_REQUESTS_MAX)
        self._started: set[_Pending] = set()
        self._login = Login(broker.credentials)
        self._host = f"/{writer.get_extra_info('peername')[0]}"

    @property
    def is_authenticated(self) -> bool:
        """Whether the client is authenticated, so that it may send all requests."""
        return self._login.done

    async def run(self) -> None:
        """Serve the client until it disconnects, sends malformed data, or is too slow. Raises only cancellation."""
        receive = asyncio.create_task(self._receive())
        answer = asyncio.create_task(self._answer())
        try:
            done, _ = await asyncio.wait((receive, answer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (OSError, EOFError, TimeoutError):
            pass  # the client has disconnected or is too slow
        except Malformed as error:
            self._broker.stats.malformed += 1
            log.warning("connection_closed", client=self._host, error=str(error))
        except Exception:
            # A bug in a handler closes only this connection, because operations on the log are atomic: they run in the
            # writer, and a bug there ends the process.
            self._broker.stats.handler_failures += 1
            log.exception("handler_failed", client=self._host)
        finally:
            for task in (receive, answer, *(pending.task for pending in self._started)):
                task.cancel()
            await asyncio.gather(receive, answer, return_exceptions=True)
            for pending in list(self._started):
                await asyncio.gather(pending.task, return_exceptions=True)
                self._release(pending)
            self._writer.transport.abort()

    async def _receive(self) -> None:
        while True:
            frame, held_bytes = await self._frame()
            try:
                request = parse(frame)
                if not self._login.done and request.api is not None and request.api.key not in BEFORE_LOGIN:
                    raise Malformed(f"{request.api.name} before authentication; clients need bus.password")
            except BaseException:
                self._memory.release(held_bytes)
                raise
            call = RequestContext(request.client_id, self._host, request.form.version, self._login)
            task = asyncio.create_task(self._handle(call, request))
            pending = _Pending(call, request, held_bytes, task)
            self._started.add(pending)
            await self._pending.put(pending)

    async def _frame(self) -> tuple[bytes, int]:
        """Read the next request. Return its bytes and the memory that it holds. Raises `EOFError` at the end of the
        connection, or `Malformed`."""
        (size,) = _SIZE.unpack(await self._start_of_frame())
        bytes_max = REQUEST_BYTES_MAX if self._login.done else _BEFORE_LOGIN_BYTES_MAX
        if not 8 <= size <= bytes_max:
            raise Malformed(f"request of {size} bytes: must be between 8 and {bytes_max} bytes")
        held_bytes = await self._memory.acquire(size)
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_S):
                return await self._reader.readexactly(size), held_bytes
        except BaseException:
            self._memory.release(held_bytes)
            raise

    async def _start_of_frame(self) -> bytes:
        """Read the 4 bytes that contain the size of the next request. There is no timeout while the client waits for
        responses."""
        while True:
            try:
                idle_s = CONNECTION_IDLE_S if self._login.done else TRANSFER_TIMEOUT_S
                async with asyncio.timeout(idle_s):
                    return await self._reader.readexactly(_SIZE.size)
            except TimeoutError:
                if not self._started:
                    raise

    async def _handle(self, call: RequestContext, request: DecodedRequest) -> Any:
        started = time.perf_counter()
        response = await respond(self._broker, call, request)
        name = request.api.name if request.api else "ApiVersions"
        self._broker.stats.requests[name] += 1
        self._broker.stats.request_seconds[name] += time.perf_counter() - started
        return response

    async def _answer(self) -> None:
        while True:
            pending = await self._pending.get()
            response = await pending.task
            if response is not None:
                sink = bytearray(_RESPONSE_START.size)
                encode_response(pending.request, response, sink)
                _RESPONSE_START.pack_into(sink, 0, len(sink) - _SIZE.size, pending.request.correlation_id)
                self._writer.write(sink)
                async with asyncio.timeout(TRANSFER_TIMEOUT_S):
                    await self._writer.drain()
            self._release(pending)
            if self._login.refused:
                return

    def _release(self, pending: _Pending) -> None:
        self._started.discard(pending)
        self._memory.release(pending.held_bytes)
        self._broker.fetch_memory.release(pending.call.response_bytes)
        pending.call.response_bytes = 0


log = get_logger(__name__)


class Server:
    """Server that accepts the Kafka clients of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._memory = MemoryBudget(REQUESTS_BYTES_MAX)
        self._connections: dict[asyncio.Task[None], Connection] = {}
        """Connections in the order in which they were opened."""
        self._server: asyncio.Server | None = None

    @property
    def request_bytes(self) -> int:
        """Number of bytes that requests in progress hold in memory."""
        return self._memory.used

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket."""
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Stop accepting connections, close all connections, and wait until they have ended."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stats = self._broker.stats
        connection = Connection(self._broker, self._memory, reader, writer)
        if len(self._connections) >= CONNECTIONS_MAX:
            is_accepted, reason = self._close_a_stranger(), f"{CONNECTIONS_MAX} clients are connected"
            if not is_accepted:
                stats.connections_refused += 1
                log.warning("connection_refused", reason=reason, open=len(self._connections))
                writer.transport.abort()
                return
            log.warning("stranger_closed", reason=f"{reason}, and a further one wants to", open=len(self._connections))
        task = asyncio.create_task(connection.run())
        self._connections[task] = connection
        stats.connections += 1
        task.add_done_callback(self._ended)

    def _close_a_stranger(self) -> bool:
        """Close the oldest connection that is not authenticated, and return whether there was one.

        Otherwise any process that can reach the port could occupy all connections, so that services could not connect.
        """
        for task, connection in self._connections.items():
            if not connection.is_authenticated and not task.cancelling():
                task.cancel()
                return True
        return False

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
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
