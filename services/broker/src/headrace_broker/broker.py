"""The parts of the broker that request handlers use: bounded memory, and the login of connections.

Connections authenticate by the user name and the password of the bus (SASL PLAIN, RFC 4616).
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from dataclasses import dataclass

from headrace_broker.cleanup import Upkeep
from headrace_broker.coordinator import Coordinator
from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log
from headrace_broker.reads import Readers
from headrace_broker.settings import BrokerSettings
from headrace_broker.stats import Stats
from headrace_broker.topics import CommittedOffsets, PartitionView, TopicCatalog, TopicStore
from headrace_broker.transactions import Transactions
from headrace_broker.writer import Writer
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.storage.disk import DiskGuard

MECHANISM = "PLAIN"


@dataclass(frozen=True, slots=True)
class Credentials:
    """User name and password that clients must send. If there is no password, all clients are accepted."""

    username: str = ""
    password: str = ""

    def match(self, message: bytes) -> bool:
        """Return whether a PLAIN message, `[identity] NUL username NUL password`, has these credentials."""
        parts = message.split(b"\0")
        if len(parts) != 3:
            return False
        username = hmac.compare_digest(parts[1], self.username.encode())
        return hmac.compare_digest(parts[2], self.password.encode()) and username


class Login:
    """State of authentication of one connection."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.done = not credentials.password
        """Whether the connection may send all requests."""
        self.refused = False
        """Whether the authentication failed, so that the connection must be closed."""
        self.agreed = False
        """Whether the client has chosen the mechanism."""

    def authenticate(self, message: bytes) -> bool:
        """Check the client's PLAIN message, and return whether it is accepted: always if no password is set."""
        self.done = self.done or self._credentials.match(message)
        self.refused = not self.done
        return self.done


REQUEST_BYTES_MAX = 8 * 1024 * 1024
"""Largest request in bytes. A larger one closes its connection."""

NODE_ID = 1


class MemoryBudget:
    """Budget of `total` bytes, granted in the order of the requests.

    A request for more than the total gets the total.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return self._total - self._free

    async def acquire(self, size: int) -> int:
        """Wait until `size` bytes of memory may be used, at most the whole budget, and return the granted number. The
        caller must release it.
        """
        size = min(size, self._total)
        if self._waiting or size > self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn  # `release` has already subtracted `size` from `_free`
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.release(size)
                raise
        else:
            self._free -= size
        return size

    def release(self, size: int) -> None:
        """Release bytes, and grant waiting requests."""
        self._free += size
        while self._waiting:
            requested, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif requested <= self._free:
                self._waiting.popleft()
                self._free -= requested
                turn.set_result(None)
            else:
                break


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker's parts, which request handlers use.

    `log`, `topics`, `offsets`, `transactions` and `upkeep` may only be used in operations of `writer.submit`.
    """

    settings: BrokerSettings
    cluster_id: str
    catalog: TopicCatalog
    writer: Writer
    readers: Readers
    coordinator: Coordinator
    log: Log
    topics: TopicStore
    offsets: CommittedOffsets
    transactions: Transactions
    upkeep: Upkeep
    clock: Clock
    stats: Stats
    fetch_memory: MemoryBudget
    folder: str
    """The folder of the file."""
    port: int
    """The port for Kafka clients."""
    credentials: Credentials
    """The user name and password that clients must send first."""
    disk: DiskGuard | None = None
    """Guard that refuses records while the disk is short of space."""
    disk_of_tables: DiskGuard | None = None
    """Guard for compacted topics. It permits more, because their size is bounded and a stack needs them to recover."""

    def now_ms(self) -> int:
        """Return the current time in milliseconds since 1970."""
        return epoch_ms(self.clock.now())

    def view(self, topic: str, number: int) -> PartitionView:
        """Return a partition. Raises `Rejected` with error code 3 if it does not exist."""
        view = self.catalog.view(topic, number)
        if view is None:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION)
        return view


@dataclass(slots=True)
class RequestContext:
    """Client and version of one request. `response_bytes` is the memory for its response that it has reserved."""

    client_id: str
    client_host: str
    version: int
    login: Login
    response_bytes: int = 0
