"""Live traffic of rollouts: turns enroll units (sessions or users) in an arm, and events about their sessions are
stored for metrics.

The topics are read without a consumer group while a rollout is in progress. Positions are stored in the database in the
transaction with the effect of the records. A round reads each topic up to its end at the start of the round: first
`turns`, then trajectories, rewards and feedback. A reward is published after the turns that it is about, so its unit is
already enrolled. After a complete round, the clocks of the rollouts advance by the time between the starts of two
rounds, measured by this process's monotonic clock. So the age of a unit is a duration of observation. Clocks of two
processes are never compared, and no unit ages while this process is down or behind, or while the bus is unavailable.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import UNITS_FULL
from headrace_registry.shadow.runner import PromptSampler
from headrace_registry.storage import rollout_store, unit_store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.tables import STREAM
from headrace_registry.storage.unit_store import Membership
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import consumer, partitions_of, record_of
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.tables import upsert
from headrace_runtime.stream.processor import Handling, Processor, read_positions
from headrace_schemas import Event, Feedback, Reward, Trajectory, Turn


class TurnHandler:
    """Stream handler of turns. It enrolls the unit of each turn in the arm and rollouts of `Turn.assignment`, stores
    the turn for the rollouts' metrics, and counts turns by the version that answered.

    Turns in the arm `rest` are counted but neither enrolled nor stored. A unit is a session or all sessions of a user,
    as the rollout's plan defines. It belongs to the arm that it was assigned to, even if another version answered. Call
    `write_counts` after each batch, in the batch's transaction.
    """

    def __init__(self, lease: LeaderLease, events_max: int, sampler: PromptSampler | None = None) -> None:
        self._lease = lease
        self._events_max = events_max
        self._sampler = sampler
        self._counting: AsyncConnection | None = None
        """The transaction that the counts belong to. If it was rolled back, the turns are counted again."""
        self._drawn: Counter[str] = Counter()
        self._answered: Counter[tuple[str, str]] = Counter()

    async def __call__(self, event: Turn, handling: Handling) -> Sequence[Event]:
        if self._sampler is not None:
            await self._sampler.sample(handling.tx, event)
        assigned = event.assignment
        if assigned is None:
            return ()
        self._count(event, handling.tx)
        if assigned.arm == "rest":
            return ()
        await self._lease.check(handling.tx)
        for rollout_id in assigned.rollouts:
            rollout = await rollout_store.load_rollout(handling.tx, rollout_id)
            if rollout is None or not rollout.is_under_way:
                continue
            member = Membership(rollout_id, assigned.unit, rollout.observed_ms)
            window_ms = round(rollout.plan.window_s * 1000)
            candidate = assigned.arm == "candidate"
            if await unit_store.enroll(
                handling.tx, member, event.session_key, event.tenant, candidate=candidate, window_ms=window_ms
            ) and not await unit_store.add_event(handling.tx, member, event, self._events_max):
                UNITS_FULL.inc()
        return ()

    def _count(self, event: Turn, tx: AsyncConnection) -> None:
        if self._counting is not tx:
            self._counting = tx
            self._drawn.clear()
            self._answered.clear()
        self._drawn[event.model] += 1
        self._answered[event.model, event.version] += 1

    async def write_counts(self, tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        if self._counting is tx:
            self._counting = None
            await self._lease.check(tx)
            await unit_store.count_turns(tx, self._drawn, self._answered)
        return ()


class SessionEventHandler:
    """Stream handler of rewards, feedback and trajectories. It stores the events of sessions that `TurnHandler` has
    enrolled in a rollout, for the rollout's metrics.

    Events of other sessions are ignored.
    """

    def __init__(self, lease: LeaderLease, events_max: int) -> None:
        self._lease = lease
        self._events_max = events_max

    async def __call__(self, event: Reward | Feedback | Trajectory, handling: Handling) -> Sequence[Event]:
        members = await unit_store.memberships(handling.tx, event.session_key, event.tenant)
        if not members:
            return ()
        await self._lease.check(handling.tx)
        for member in members:
            if not await unit_store.add_event(handling.tx, member, event, self._events_max):
                UNITS_FULL.inc()
        return ()


log = get_logger(__name__)
OUTCOME_TOPICS = (Trajectory.topic, Reward.topic, Feedback.topic)
_BATCH_MAX = 200
_RECONNECT_S = 0.5
READ_INTERVAL_S = 0.5
"""Seconds between reads of the topics while a rollout is under way."""
_STEP_MAX_S = 5.0
"""Maximum seconds that one round adds to the clocks of rollouts. A longer round means that the process was stopped or
the machine was suspended."""


class TrafficReader:
    """Reader of the topics of live traffic. It reads while the event `enabled` is set. The event `following` is set
    while no record is missed."""

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        bus: BusSettings,
        on_round: Callable[[], None],
    ) -> None:
        """Create a reader. `on_round` is called after each complete round."""
        self._processor = processor
        self._lease = lease
        self._bus = bus
        self._read = on_round
        self._round_s: float | None = None
        self.enabled = asyncio.Event()
        self.following = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled, and reconnect after a failure of the bus. Raises if the processor stops retrying."""
        while True:
            await self.enabled.wait()
            reader = consumer(self._bus, "headrace-registry-live")
            try:
                await reader.start()
                partitions = await self._connect(reader)
                self._round_s = None
                self.following.set()
                while self.enabled.is_set():
                    await self._round(reader, partitions)
                    await asyncio.sleep(READ_INTERVAL_S)
            except (KafkaError, OSError, _BusAway) as error:
                log.warning("reader_reconnects", error=repr(error))
            finally:
                self.following.clear()
                await reader.stop()
            await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, reader: AIOKafkaConsumer) -> dict[str, list[TopicPartition]]:
        """Assign all partitions, and seek to the stored positions, or to the end of the topics if no rollout is in
        progress."""
        try:
            partitions = {topic: await partitions_of(reader, topic) for topic in (Turn.topic, *OUTCOME_TOPICS)}
        except Unavailable as error:
            raise _BusAway(str(error)) from error
        all_partitions = [partition for topic_partitions in partitions.values() for partition in topic_partitions]
        reader.assign(all_partitions)
        ends = await reader.end_offsets(all_partitions)

        async def begin(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            is_active = bool(await rollout_store.rollouts_under_way(tx))
            for partition, end in ends.items():
                key = {"topic": partition.topic, "partition": partition.partition}
                await upsert(tx, STREAM.positions, key, {"next_offset": end}, update=not is_active)
            return ()

        await self._processor.step(begin)
        async with self._processor.database.transaction() as tx:
            reached = {topic: await read_positions(tx, STREAM, topic) for topic in partitions}
        for partition in all_partitions:
            reader.seek(partition, reached[partition.topic].get(partition.partition, ends[partition]))
        return partitions

    async def _round(self, reader: AIOKafkaConsumer, partitions: dict[str, list[TopicPartition]]) -> None:
        began_s = self._processor.clock.monotonic_s()
        outcome_partitions = [partition for topic in OUTCOME_TOPICS for partition in partitions[topic]]
        outcome_ends = await reader.end_offsets(
            outcome_partitions
        )  # before those of `turns`: an outcome follows its turns
        turn_ends = await reader.end_offsets(partitions[Turn.topic])
        for ends in (turn_ends, outcome_ends):
            await self._read_to(reader, ends)
        if self._round_s is not None:
            elapsed_ms = round(1000 * min(began_s - self._round_s, _STEP_MAX_S))
            await self._elapse(elapsed_ms)
        self._round_s = began_s
        self._read()

    async def _read_to(self, reader: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> None:
        """Process the records before the offsets `ends`. Later records are processed in the next round."""
        while True:
            behind = [partition for partition, end in ends.items() if await reader.position(partition) < end]
            if not behind:
                return
            batches = await reader.getmany(*behind, timeout_ms=1000, max_records=_BATCH_MAX)
            records: list[Record] = []
            for partition, messages in batches.items():
                records += [record_of(message) for message in messages if message.offset < ends[partition]]
                if messages and messages[-1].offset >= ends[partition]:
                    reader.seek(partition, ends[partition])
            if records:
                await self._processor.process(records)

    async def _elapse(self, milliseconds: int) -> None:
        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            await unit_store.advance_clocks(tx, milliseconds)
            return ()

        await self._processor.step(work)


class _BusAway(Exception):
    """Raised if a topic does not exist yet. It requires a new connection, in contrast to `Unavailable` from the
    processor."""
