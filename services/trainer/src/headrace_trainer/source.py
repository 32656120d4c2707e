"""The trainer's place on the bus: every partition assigned by hand, no consumer group, offsets kept by the lineage
(P4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from headrace_runtime.consumer import consumer, partitions_of, record_of
from headrace_runtime.errors import HeadraceError, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.settings import BusSettings
from headrace_runtime.wire import Record
from headrace_trainer.experiences.state import Offsets
from headrace_trainer.metrics import EXPIRED

log = get_logger(__name__)
_CLIENT = "headrace/trainer"
_POLL_MS = 250
_RECORDS_MAX = 500


class BusReplaced(HeadraceError):
    """The bus ends before what the lineage has already read: it is not the bus that the lineage knows."""


class Source(Protocol):
    """Records of two topics: experiences, which can be held back, and decisions about versions, which cannot."""

    async def start(self, offsets: Offsets) -> None: ...

    async def poll(self, room: int) -> list[Record]:
        """What is there, at most `room` experiences; waits a moment when there is nothing."""

    async def at_end(self) -> bool:
        """Whether all experiences were read that there were at the start."""

    async def fetch(self, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """Experience records read before, by partition and offset; those that the bus no longer has are not in it."""

    async def stop(self) -> None: ...


class KafkaSource:
    """`Source` on a real bus. Its memory is bounded by what the consumer fetches ahead."""

    def __init__(self, bus: BusSettings, experiences: str, decisions: str) -> None:
        self._bus = bus
        self._experiences = experiences
        self._decisions = decisions
        self._reader: AIOKafkaConsumer | None = None
        self._held: list[TopicPartition] = []
        self._partitions: list[TopicPartition] = []
        self._ends: dict[TopicPartition, int] = {}

    @property
    def started(self) -> bool:
        return self._reader is not None

    async def start(self, offsets: Offsets) -> None:
        """Go to `offsets`; partitions without one start at their first record. Raises `BusReplaced`, `Unavailable`."""
        reader = consumer(self._bus, _CLIENT)
        try:
            await reader.start()
            self._held = await partitions_of(reader, self._experiences)
            self._partitions = [*self._held, *await partitions_of(reader, self._decisions)]
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
            self._reader.resume(*self._held)
        else:
            self._reader.pause(*self._held)
        limit = min(room, _RECORDS_MAX) or _RECORDS_MAX
        found = await self._reader.getmany(timeout_ms=_POLL_MS, max_records=limit)
        return [record_of(message) for messages in found.values() for message in messages]

    async def at_end(self) -> bool:
        assert self._reader is not None
        positions = [(await self._reader.position(place), self._ends[place]) for place in self._held]
        return all(position >= end for position, end in positions)

    async def fetch(self, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        if not places:
            return {}
        reader = consumer(self._bus, _CLIENT)
        try:
            await reader.start()
            partitions = sorted({TopicPartition(self._experiences, partition) for partition, _ in places})
            first = await reader.beginning_offsets(partitions)
            found: dict[tuple[int, int], Record] = {}
            for partition, offset in sorted(places):
                place = TopicPartition(self._experiences, partition)
                if offset >= first[place]:
                    record = await self._record(reader, place, offset)
                    found |= {(partition, offset): record} if record is not None else {}
            return found
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error
        finally:
            await reader.stop()

    async def _record(self, reader: AIOKafkaConsumer, place: TopicPartition, offset: int) -> Record | None:
        reader.assign([place])
        reader.seek(place, offset)
        timeout_ms = int(self._bus.request_timeout_s * 1000)
        messages = (await reader.getmany(place, timeout_ms=timeout_ms, max_records=1)).get(place) or []
        return record_of(messages[0]) if messages and messages[0].offset == offset else None

    async def stop(self) -> None:
        if self._reader is not None:
            await self._reader.stop()
            self._reader = None

    async def _seek(self, reader: AIOKafkaConsumer, offsets: Offsets) -> None:
        first, end = await reader.beginning_offsets(self._partitions), await reader.end_offsets(self._partitions)
        self._ends = end
        for place in self._partitions:
            wanted = offsets.get(place.topic, {}).get(place.partition, first[place])
            if wanted > end[place]:
                raise BusReplaced(
                    f"{place.topic}[{place.partition}] ends at {end[place]}, the lineage has read up to {wanted}: "
                    "bring the old bus back, or choose another trainer.lineage with the last version as trainer.base"
                )
            if wanted < first[place]:
                EXPIRED.inc(first[place] - wanted)
                log.error("records_expired", topic=place.topic, partition=place.partition, lost=first[place] - wanted)
            reader.seek(place, max(wanted, first[place]))

    def _check_partitions(self, reader: AIOKafkaConsumer) -> None:
        """More partitions than at the start are noticed within a metadata refresh, and found by the next start."""
        for topic in (self._experiences, self._decisions):
            known = {place.partition for place in self._partitions if place.topic == topic}
            added = (reader.partitions_for_topic(topic) or known) - known
            if added:
                raise Unavailable(f"{topic} has new partitions {sorted(added)}; starting again to read them too")
