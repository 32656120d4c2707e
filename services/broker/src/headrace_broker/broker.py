"""The parts that request handlers work with."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_broker.budget import MemoryBudget
from headrace_broker.catalog import PartitionView, TopicCatalog
from headrace_broker.coordinator import Coordinator
from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log
from headrace_broker.login import Credentials, Login
from headrace_broker.offsets import CommittedOffsets
from headrace_broker.readers import Readers
from headrace_broker.settings import BrokerSettings
from headrace_broker.stats import Stats
from headrace_broker.topics import TopicStore
from headrace_broker.transactions import Transactions
from headrace_broker.upkeep import Upkeep
from headrace_broker.writer import Writer
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.disk import DiskGuard

NODE_ID = 1


@dataclass(frozen=True, slots=True)
class Broker:
    """`log`, `topics`, `offsets`, `transactions` and `upkeep` are used inside `writer.submit` alone."""

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
    """Where the file is."""
    port: int
    """Where Kafka clients find us."""
    credentials: Credentials
    """What clients have to send before anything else."""
    disk: DiskGuard | None = None
    """Records are refused while the disk is short."""
    disk_of_tables: DiskGuard | None = None
    """The same for compacted topics, whose size is bounded: they are what a stack recovers by, so they go on longer."""

    def now_ms(self) -> int:
        return epoch_ms(self.clock.now())

    def view(self, topic: str, number: int) -> PartitionView:
        """Raises `Rejected` (3) for a partition that does not exist."""
        view = self.catalog.view(topic, number)
        if view is None:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION)
        return view


@dataclass(slots=True)
class RequestContext:
    """The context of one request. `response_bytes` is the response memory that it holds."""

    client_id: str
    client_host: str
    version: int
    login: Login
    response_bytes: int = 0
