"""Maintenance while the broker runs: retention, compaction, and deletion of deleted topics' records, unused producers
and unused groups.

It reads in a thread of its own with its own connection, and writes in small operations between those of clients. After
each read it pauses as long as the read took, so that clients are hardly affected.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from headrace_broker import cleanup
from headrace_broker.broker import Broker
from headrace_broker.cleanup import LogBounds
from headrace_broker.errors import Code, Rejected
from headrace_broker.reads import Readers
from headrace_broker.topic_config import TopicConfig
from headrace_broker.topics import PartitionView
from headrace_runtime.process.logs import get_logger

_PRODUCER_RETENTION_S = 7 * 86_400.0
"""Seconds after the last batch of a producer at which its sequence numbers and transactional ids are deleted."""
COMPACTION_KEYS_MAX = 200_000
"""Maximum number of distinct keys of one compaction pass in memory (about 150 bytes each)."""

P = ParamSpec("P")
T = TypeVar("T")
log = get_logger(__name__)
TRANSACTIONS_INTERVAL_S = 1.0


class Maintenance:
    """Background task that deletes expired and compacted records, records of deleted topics, and the state of unused
    producers.

    If the disk is full, it tries again in the next round.
    """

    def __init__(self, broker: Broker, readers: Readers) -> None:
        self._broker = broker
        self._readers = readers
        self._settings = broker.settings

    async def run(self) -> None:
        """Run rounds of maintenance until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(self._settings.maintenance_interval_s, self.round))
            group.create_task(self._every(TRANSACTIONS_INTERVAL_S, self.expire_transactions))

    async def round(self) -> None:
        """Run one round of maintenance on all partitions: delete expired records, compact, and delete records of
        deleted topics."""
        await self._purge_deleted()
        for topic in list(self._broker.catalog.topics.values()):
            for view in topic.partitions:
                await self._maintain(view, topic.config)
        before_ms = self._broker.now_ms() - round(_PRODUCER_RETENTION_S * 1000)
        await self._broker.writer.submit(partial(self._broker.log.forget_producers, before_ms))
        await self._broker.coordinator.expire()
        while await self._broker.writer.submit(self._broker.upkeep.shrink):
            pass

    async def expire_transactions(self) -> None:
        """Abort transactions that exceed their timeouts, and delete transactional ids that were not used for a week."""
        now_ms = self._broker.now_ms()
        forget_before_ms = now_ms - round(_PRODUCER_RETENTION_S * 1000)
        await self._broker.writer.submit(partial(self._broker.transactions.expire, now_ms, forget_before_ms))

    async def _maintain(self, view: PartitionView, config: TopicConfig) -> None:
        try:
            if config.deletes:
                await self._expire(view, config)
            if config.compacts:
                await self._compact(view, config)
        except Rejected as error:
            if error.code is not Code.UNKNOWN_TOPIC_OR_PARTITION:  # the topic was deleted meanwhile
                raise

    async def _expire(self, view: PartitionView, config: TopicConfig) -> None:
        while True:
            bounds = LogBounds(view.id, view.start, view.stable, view.bytes)
            cut = await self._read(cleanup.retention_offset, bounds, config, self._broker.now_ms())
            if cut <= bounds.start:
                return
            freed = await self._broker.writer.submit(partial(self._broker.upkeep.cut, view.id, cut))
            self._broker.stats.expired_bytes += freed

    async def _compact(self, view: PartitionView, config: TopicConfig) -> None:
        cleaned_to, clean_bytes = await self._read(cleanup.progress, view.id)
        dirty_bytes = view.bytes - clean_bytes
        last = await self._read(cleanup.last_batch, view.id)
        limit = min(view.stable, view.end if last is None else last)
        if config.min_compaction_lag_ms:
            young_ms = self._broker.now_ms() - config.min_compaction_lag_ms
            limit = await self._read(cleanup.first_younger, view.id, cleaned_to, limit, young_ms)
        if dirty_bytes < max(clean_bytes, 1) or cleaned_to >= limit:
            return
        work = cleanup.CompactionPass(
            partition_id=view.id,
            start=view.start,
            limit=limit,
            at=max(cleaned_to, view.start),
            tombstones_before_ms=self._broker.now_ms() - config.delete_retention_ms,
            keys_max=COMPACTION_KEYS_MAX,
        )
        await self._read(cleanup.begin, work)
        while await self._read(cleanup.index, work):
            pass
        work.at = work.start
        while (changes := await self._read(cleanup.rewrite, work)) is not None:
            saved = await self._broker.writer.submit(partial(self._broker.upkeep.replace, view.id, changes))
            self._broker.stats.compacted_bytes += saved
        record_pass = partial(self._broker.upkeep.record_pass, view.id, work.limit, work.kept_bytes)
        await self._broker.writer.submit(record_pass)

    async def _purge_deleted(self) -> None:
        while (partition_id := await self._read(cleanup.deleted_partition)) is not None:
            while await self._broker.writer.submit(partial(self._broker.upkeep.purge, partition_id)):
                pass

    async def _read(
        self, read: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        started = time.perf_counter()
        result = await self._readers.run(read, *args, **kwargs)
        await asyncio.sleep(time.perf_counter() - started)
        return result

    async def _every(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> NoReturn:
        while True:
            await self._broker.clock.sleep(interval_s)
            try:
                await work()
            except Rejected as error:
                if error.code not in (Code.STORAGE_ERROR, Code.COORDINATOR_NOT_AVAILABLE):
                    raise
                log.warning("maintenance_postponed", error=str(error))
