"""Parts of the broker that request handlers use, a limit on memory, and the login of clients.

Clients authenticate with the user name and the password of the bus (SASL PLAIN, RFC 4616).
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
    """User name and password that clients must send. Without a password, every client is accepted."""

    username: str = ""
    password: str = ""

    def match(self, message: bytes) -> bool:
        """Return whether a message of SASL PLAIN (`[identity] NUL username NUL password`) contains these
        credentials."""
        parts = message.split(b"\0")
        if len(parts) != 3:
            return False
        username = hmac.compare_digest(parts[1], self.username.encode())
        return hmac.compare_digest(parts[2], self.password.encode()) and username


class Login:
    """Authentication state of one connection."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.done = not credentials.password
        """Whether the connection may send all requests."""
        self.refused = False
        """Whether the authentication failed, so that the connection must be closed."""
        self.agreed = False
        """Whether the client has chosen the mechanism."""

    def authenticate(self, message: bytes) -> bool:
        """Check the client's PLAIN message. Return whether the connection is authenticated, which it always is if no
        password is set."""
        self.done = self.done or self._credentials.match(message)
        self.refused = not self.done
        return self.done


REQUEST_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of a request in bytes. The connection of a larger request is closed."""

NODE_ID = 1


class MemoryBudget:
    """Limit on memory: `total` bytes that requests acquire in the order of their calls.

    A request for more than `total` bytes gets `total`.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return self._total - self._free

    async def acquire(self, size: int) -> int:
        """Wait until `size` bytes are free, or all bytes if `size` is larger than the limit. Return the number of
        acquired bytes, which the caller must release."""
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
        """Release `size` bytes, and let waiting calls of `acquire` continue."""
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
    """Parts of the broker that request handlers use.

    `log`, `topics`, `offsets`, `transactions` and `upkeep` belong to the writer's thread, so they may only be used in
    operations of `writer.submit`.
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
    """Path of the folder that contains the broker's file."""
    port: int
    """The port for Kafka clients."""
    credentials: Credentials
    """User name and password that clients must send."""
    disk: DiskGuard | None = None
    """Free-space check for records of ordinary topics; None for no check."""
    disk_of_tables: DiskGuard | None = None
    """Free-space check for records of compacted topics, which permits more: their size is bounded, and services need
    them to recover."""

    def now_ms(self) -> int:
        """Return the current time in milliseconds since 1970."""
        return epoch_ms(self.clock.now())

    def view(self, topic: str, number: int) -> PartitionView:
        """Return the state of a topic's partition. Raises `Rejected` with error code 3 if it does not exist."""
        view = self.catalog.view(topic, number)
        if view is None:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION)
        return view


@dataclass(slots=True)
class RequestContext:
    """Client, version and login of one request. `response_bytes` is the memory that was reserved for its response."""

    client_id: str
    client_host: str
    version: int
    login: Login
    response_bytes: int = 0
