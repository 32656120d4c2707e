"""End offsets of partitions and committed offsets of a consumer group, read without joining the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from headrace_runtime.consumer import consumer, partitions_of
from headrace_runtime.errors import Unavailable
from headrace_runtime.settings import BusSettings


class Offsets:
    """One connection that only asks. Start before use; every question raises `Unavailable` when the bus is away."""

    def __init__(self, bus: BusSettings, group: str | None, client: str = "") -> None:
        """Without a group only `ends` can be asked."""
        self._bus = bus
        self._group = group
        self._client = client or f"{group}-offsets"
        self._reader: AIOKafkaConsumer | None = None
        self._known: dict[str, list[TopicPartition]] = {}

    async def start(self) -> None:
        reader = consumer(self._bus, self._client, group_id=self._group)  # never subscribes, never joins
        try:
            await reader.start()
        except (KafkaError, OSError) as error:
            await reader.stop()
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error
        self._reader = reader

    async def stop(self) -> None:
        if self._reader is not None:
            await self._reader.stop()
            self._reader = None

    async def ends(self, topic: str) -> Mapping[int, int]:
        """Partition to the offset that its next record will get."""
        try:
            found = await self._connected().end_offsets(await self._partitions(topic))
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: end of {topic}: {error!r}") from error
        return {place.partition: offset for place, offset in found.items()}

    async def starts(self, topics: Sequence[str]) -> Mapping[tuple[str, int], int]:
        """Where the group will begin to read: what it has committed, else the oldest record that is left."""
        try:
            places: dict[tuple[str, int], int] = {}
            for topic in topics:
                beginnings = await self._connected().beginning_offsets(await self._partitions(topic))
                for place, beginning in beginnings.items():
                    committed = await self._connected().committed(place)
                    places[topic, place.partition] = beginning if committed is None else committed
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: offsets of {self._group}: {error!r}") from error
        return places

    def _connected(self) -> AIOKafkaConsumer:
        if self._reader is None:
            raise Unavailable("the connection that asks for offsets is not started")
        return self._reader

    async def _partitions(self, topic: str) -> list[TopicPartition]:
        if topic not in self._known:
            self._known[topic] = await partitions_of(self._connected(), topic)
        return self._known[topic]
