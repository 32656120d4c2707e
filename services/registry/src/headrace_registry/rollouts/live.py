"""Reads live traffic while a rollout goes on, without a consumer group: positions are in the database, next to what
was made of the records.

A round reads every topic up to where it ended when the round began, first what was said and by whom (`turns`), then
what was said about it: a reward is on its topic only after the turns that it is about, so it finds its unit. When a
round is complete, the clock of the rollouts goes on by the time between the beginnings of two rounds, on this process's
monotonic clock. So ages are durations that were watched; no two clocks are compared, and while this process is away,
or behind, or the bus is, nothing gets older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.leader import LeaderLease
from headrace_registry.rollouts import kept, ledger
from headrace_registry.tables import STREAM
from headrace_runtime.consumer import consumer, partitions_of, record_of
from headrace_runtime.errors import Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor, position
from headrace_runtime.settings import BusSettings
from headrace_runtime.upsert import upsert
from headrace_runtime.wire import Record
from headrace_schemas import Event, Feedback, Reward, Trajectory, Turn

log = get_logger(__name__)
SAID = (Trajectory.topic, Reward.topic, Feedback.topic)
_BATCH_MAX = 200
_RECONNECT_S = 0.5
_STEP_MAX_S = 5.0
"""A round that took longer was no watching: the process was stopped, or the machine slept."""


class LiveReader:
    """`wanted` makes it read; `following` says that it does, and nothing is missed from then on."""

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        bus: BusSettings,
        every_s: float,
        read: Callable[[], None],
    ) -> None:
        """`read` is called after each complete round: more may be known now."""
        self._processor = processor
        self._lease = lease
        self._bus = bus
        self._every_s = every_s
        self._read = read
        self._round_s: float | None = None
        self.wanted = asyncio.Event()
        self.following = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; a bus that goes away is waited for. Raises when the processor gives up."""
        while True:
            await self.wanted.wait()
            reader = consumer(self._bus, "headrace-registry-live")
            try:
                await reader.start()
                places = await self._connect(reader)
                self._round_s = None
                self.following.set()
                while self.wanted.is_set():
                    await self._round(reader, places)
                    await asyncio.sleep(self._every_s)
            except (KafkaError, OSError, _BusAway) as error:
                log.warning("reader_reconnects", error=repr(error))
            finally:
                self.following.clear()
                await reader.stop()
            await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, reader: AIOKafkaConsumer) -> dict[str, list[TopicPartition]]:
        """From where the database is. What was on the topics before any rollout is nobody's: it is passed over."""
        try:
            places = {topic: await partitions_of(reader, topic) for topic in (Turn.topic, *SAID)}
        except Unavailable as error:
            raise _BusAway(str(error)) from error
        everywhere = [place for found in places.values() for place in found]
        reader.assign(everywhere)
        ends = await reader.end_offsets(everywhere)

        async def begin(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            begun = bool(await kept.under_way(tx))
            for place, end in ends.items():
                key = {"topic": place.topic, "partition": place.partition}
                await upsert(tx, STREAM.positions, key, {"next_offset": end}, update=not begun)
            return ()

        await self._processor.step(begin)
        async with self._processor.database.transaction() as tx:
            reached = {topic: await position(tx, STREAM, topic) for topic in places}
        for place in everywhere:
            reader.seek(place, reached[place.topic].get(place.partition, ends[place]))
        return places

    async def _round(self, reader: AIOKafkaConsumer, places: dict[str, list[TopicPartition]]) -> None:
        began_s = self._processor.clock.monotonic_s()
        about = [place for topic in SAID for place in places[topic]]
        about_ends = await reader.end_offsets(about)  # before those of `turns`: what is said comes after its turns
        turn_ends = await reader.end_offsets(places[Turn.topic])
        for ends in (turn_ends, about_ends):
            await self._read_to(reader, ends)
        if self._round_s is not None:
            elapsed_ms = round(1000 * min(began_s - self._round_s, _STEP_MAX_S))
            await self._elapse(elapsed_ms)
        self._round_s = began_s
        self._read()

    async def _read_to(self, reader: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> None:
        """Hand on everything before `ends`; what is behind them is left for the next round."""
        while True:
            behind = [place for place, end in ends.items() if await reader.position(place) < end]
            if not behind:
                return
            found = await reader.getmany(*behind, timeout_ms=1000, max_records=_BATCH_MAX)
            records: list[Record] = []
            for place, messages in found.items():
                records += [record_of(message) for message in messages if message.offset < ends[place]]
                if messages and messages[-1].offset >= ends[place]:
                    reader.seek(place, ends[place])
            if records:
                await self._processor.process(records)

    async def _elapse(self, milliseconds: int) -> None:
        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            await ledger.elapse(tx, milliseconds)
            return ()

        await self._processor.step(work)


class _BusAway(Exception):
    """A topic is not there (yet); unlike `Unavailable` from the processor, worth another connection."""
