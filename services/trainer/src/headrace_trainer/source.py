"""Reads the trainer's topics from the bus: all partitions are assigned by hand, without a consumer group, and the
lineage stores the offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from headrace_runtime.errors import HeadraceError, Unavailable
from headrace_runtime.kafka.consumer import consumer, partitions_of, record_of
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_schemas import Event
from headrace_trainer.experiences.reports import Offsets
from headrace_trainer.metrics import EXPIRED

log = get_logger(__name__)
_CLIENT = "headrace/trainer"
_POLL_MS = 250
_RECORDS_MAX = 500


class BusReplaced(HeadraceError):
    """Raised when the bus ends before the lineage's offsets, so that it is not the bus which the lineage has read."""


class Source(Protocol):
    """Interface through which the trainer reads the bus: experiences, and the registry's decisions about versions."""

    async def start(self, offsets: Offsets) -> None: ...

    async def poll(self, room: int) -> list[Record]:
        """Return the next records, at most `room` of them experiences. If there are none, wait a moment for them."""

    async def at_end(self) -> bool:
        """Return whether all experiences were read that were on the bus when the source was started."""

    async def fetch(self, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """Read records of experiences again, by partition and offset.

        Records that the bus no longer has are left out.
        """

    async def stop(self) -> None: ...


class KafkaSource:
    """`Source` that reads from Kafka. The consumer's prefetch limit bounds its memory."""

    def __init__(self, bus: BusSettings, experiences: str, decisions: str) -> None:
        self._bus = bus
        self._experiences = experiences
        self._decisions = decisions
        self._reader: AIOKafkaConsumer | None = None
        self._experience_partitions: list[TopicPartition] = []
        self._partitions: list[TopicPartition] = []
        self._ends: dict[TopicPartition, int] = {}

    @property
    def started(self) -> bool:
        return self._reader is not None

    async def start(self, offsets: Offsets) -> None:
        """Connect and seek to `offsets`. Partitions without an offset are read from their first record.

        Raises:
            BusReplaced: the bus ends before `offsets`.
            Unavailable: the bus does not answer.
        """
        reader = consumer(self._bus, _CLIENT)
        try:
            await reader.start()
            self._experience_partitions = await partitions_of(reader, self._experiences)
            self._partitions = [*self._experience_partitions, *await partitions_of(reader, self._decisions)]
            reader.assign(self._partitions)
            await self._seek(reader, offsets)
        except (KafkaError, OSError) as error:
            await reader.stop()
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error
        except BaseException:
            await reader.stop()
            raise
        self._reader = reader

    async def poll(self, room: int) -> list[Record]:
        assert self._reader is not None
        self._check_partitions(self._reader)
        if room:
            self._reader.resume(*self._experience_partitions)
        else:
            self._reader.pause(*self._experience_partitions)
        limit = min(room, _RECORDS_MAX) or _RECORDS_MAX
        batches = await self._reader.getmany(timeout_ms=_POLL_MS, max_records=limit)
        return [record_of(message) for messages in batches.values() for message in messages]

    async def at_end(self) -> bool:
        assert self._reader is not None
        positions = [
            (await self._reader.position(partition), self._ends[partition]) for partition in self._experience_partitions
        ]
        return all(position >= end for position, end in positions)

    async def fetch(self, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        if not positions:
            return {}
        reader = consumer(self._bus, _CLIENT)
        try:
            await reader.start()
            partitions = sorted({TopicPartition(self._experiences, partition) for partition, _ in positions})
            first = await reader.beginning_offsets(partitions)
            records: dict[tuple[int, int], Record] = {}
            for partition, offset in sorted(positions):
                topic_partition = TopicPartition(self._experiences, partition)
                if offset >= first[topic_partition]:
                    record = await self._read_record(reader, topic_partition, offset)
                    records |= {(partition, offset): record} if record is not None else {}
            return records
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error
        finally:
            await reader.stop()

    async def _read_record(self, reader: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> Record | None:
        reader.assign([partition])
        reader.seek(partition, offset)
        timeout_ms = int(self._bus.request_timeout_s * 1000)
        messages = (await reader.getmany(partition, timeout_ms=timeout_ms, max_records=1)).get(partition) or []
        return record_of(messages[0]) if messages and messages[0].offset == offset else None

    async def stop(self) -> None:
        if self._reader is not None:
            await self._reader.stop()
            self._reader = None

    async def _seek(self, reader: AIOKafkaConsumer, offsets: Offsets) -> None:
        first, end = await reader.beginning_offsets(self._partitions), await reader.end_offsets(self._partitions)
        self._ends = end
        for partition in self._partitions:
            saved = offsets.get(partition.topic, {}).get(partition.partition, first[partition])
            if saved > end[partition]:
                raise BusReplaced(
                    f"{partition.topic}[{partition.partition}] ends at {end[partition]}, but the lineage has read up "
                    f"to {saved}: bring the old bus back, or choose another trainer.lineage with the last version as "
                    "trainer.base"
                )
            if saved < first[partition]:
                lost = first[partition] - saved
                EXPIRED.inc(lost)
                log.error("records_expired", topic=partition.topic, partition=partition.partition, lost=lost)
            reader.seek(partition, max(saved, first[partition]))

    def _check_partitions(self, reader: AIOKafkaConsumer) -> None:
        """Raise `Unavailable` if a topic has got new partitions, so that a restart reads them, too.

        New partitions are noticed at the next metadata refresh.
        """
        for topic in (self._experiences, self._decisions):
            known_partitions = {item.partition for item in self._partitions if item.topic == topic}
            added = (reader.partitions_for_topic(topic) or known_partitions) - known_partitions
            if added:
                raise Unavailable(f"{topic} has new partitions {sorted(added)}; the restart reads them, too")


class Sink(Protocol):
    """Interface of the trainer's output, to which it sends announcements, such as
    `headrace_runtime.kafka.producer.EventProducer`."""

    async def send(self, event: Event) -> None: ...
