"""Reader of end offsets of partitions, and of committed offsets of a consumer group without joining it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from headrace_runtime.consumer import consumer, partitions_of
from headrace_runtime.errors import Unavailable
from headrace_runtime.settings import BusSettings


class Offsets:
    """Connection that reads offsets.

    Call `start` before use. Methods raise `Unavailable` if the bus does not respond.
    """

    def __init__(self, bus: BusSettings, group: str | None, client: str = "") -> None:
        """Create the reader. Without a group only `ends` is available."""
        self._bus = bus
        self._group = group
        self._client = client or f"{group}-offsets"
        self._reader: AIOKafkaConsumer | None = None
        self._partitions: dict[str, list[TopicPartition]] = {}

    async def start(self) -> None:
        """Connect."""
        reader = consumer(self._bus, self._client, group_id=self._group)  # never subscribes, never joins
        try:
            await reader.start()
        except (KafkaError, OSError) as error:
            await reader.stop()
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error
        self._reader = reader

    async def stop(self) -> None:
        """Disconnect."""
        if self._reader is not None:
            await self._reader.stop()
            self._reader = None

    async def ends(self, topic: str) -> Mapping[int, int]:
        """Return the offset of the next record of each partition."""
        try:
            end_offsets = await self._connected().end_offsets(await self._partitions_of(topic))
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: end of {topic}: {error!r}") from error
        return {partition.partition: offset for partition, offset in end_offsets.items()}

    async def starts(self, topics: Sequence[str]) -> Mapping[tuple[str, int], int]:
        """Return the offsets at which the group will begin to read: committed ones, or those of the oldest records."""
        try:
            starts: dict[tuple[str, int], int] = {}
            for topic in topics:
                beginnings = await self._connected().beginning_offsets(await self._partitions_of(topic))
                for partition, beginning in beginnings.items():
                    committed = await self._connected().committed(partition)
                    starts[topic, partition.partition] = beginning if committed is None else committed
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: offsets of {self._group}: {error!r}") from error
        return starts

    def _connected(self) -> AIOKafkaConsumer:
        if self._reader is None:
            raise Unavailable("the reader of offsets is not started")
        return self._reader

    async def _partitions_of(self, topic: str) -> list[TopicPartition]:
        if topic not in self._partitions:
            self._partitions[topic] = await partitions_of(self._connected(), topic)
        return self._partitions[topic]
