"""Skips a damaged record batch: the reader gets a record that names the damage, and continues after it.

aiokafka's own consumer, and Faust's on top of it, raise `CorruptRecordException` when a batch does not hash to its
checksum, and again at every further poll: the position never moves. Importing this module replaces the class that
unpacks fetched bytes. A batch that fails its checksum, that cannot be decompressed or parsed, or that the broker
answers with CORRUPT_MESSAGE, comes out as one record with the header `headrace_damage`, which `wire.decode` refuses:
whoever reads dead-letters it with its place, as any other record that can never become valid.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aiokafka import ConsumerRecord
from aiokafka.consumer import consumer as consumers
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.memory_records import MemoryRecords

HEADER = "headrace_damage"
_OVERHEAD = 12  # base offset and length
_HEADER_BYTES = 61  # of a batch in format 2
_KEPT_BYTES_MAX = 1_000_000
_CORRUPT_MESSAGE = 2
_ASKED_AGAIN = 3
"""How often in a row a broker has to answer CORRUPT_MESSAGE before its word is taken for it."""


class Batches:
    """Takes the place of aiokafka's `MemoryRecords`; what cannot be read raises, and `rest` says where to go on."""

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._next = 0
        self._at = 0

    def size_in_bytes(self) -> int:
        return len(self._data)

    def has_next(self) -> bool:
        """The first batch of an answer is always whole (KIP-74); a further one may be cut."""
        return self._next < len(self._data) and (self._next == 0 or self._whole(self._next))

    def next_batch(self) -> Any:
        self._at = self._next
        if not self._whole(self._at):
            self._next = len(self._data)
            raise CorruptRecordException("its length is not that of a batch")
        self._next = self._end(self._at)
        return MemoryRecords(self._data[self._at : self._next]).next_batch()

    def damaged(self) -> bytes:
        """The bytes of the batch that was taken last."""
        return self._data[self._at : self._next][:_KEPT_BYTES_MAX]

    def resume(self, position: int) -> int:
        """The offset behind the batch that was taken last, which begins at or before `position`.

        Nothing in the batch is sure, so it takes two that agree: the next batch that is whole, or the header's count
        of records and its last offset. Else only `position` is passed: what is behind it is asked for again.
        """
        if self._next < len(self._data) and self._whole(self._next):
            following = MemoryRecords(self._data[self._next : self._end(self._next)]).next_batch()
            if following.validate_crc() and following.base_offset > position:
                return int(following.base_offset)
        batch = self._data[self._at : self._next]
        if len(batch) >= _HEADER_BYTES:
            base, last = struct.unpack_from(">q", batch, 0)[0], struct.unpack_from(">i", batch, 23)[0]
            count = struct.unpack_from(">i", batch, 57)[0]
            if count == last + 1 and base <= position <= base + last:
                return int(base + count)
        return position + 1

    def _end(self, at: int) -> int:
        return at + _OVERHEAD + int(struct.unpack_from(">i", self._data, at + 8)[0])

    def _whole(self, at: int) -> bool:
        return len(self._data) - at > _OVERHEAD and at + _OVERHEAD < self._end(at) <= len(self._data)


class Unpacked(fetcher.PartitionRecords):  # type: ignore[misc]
    """Goes on behind what is damaged."""

    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        while True:
            try:
                yield from super()._unpack_records()
            except Exception as error:  # noqa: BLE001 - whatever damaged bytes make a parser raise
                yield self._damaged(error)
            else:
                return

    def _damaged(self, error: Exception) -> ConsumerRecord:
        at = self.next_fetch_offset
        self.next_fetch_offset = self._records.resume(at)
        reason = f"offsets {at} to {self.next_fetch_offset - 1}: {type(error).__name__}: {error}"
        value = self._records.damaged()
        headers = ((HEADER, reason[:1000].encode()),)
        return ConsumerRecord(self._tp.topic, self._tp.partition, at, 0, 0, None, value, None, -1, len(value), headers)


class _Client:
    """The fetcher's client; an answer that insists on CORRUPT_MESSAGE becomes bytes that are no batch."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._told: Counter[tuple[str, int, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node_id: int, request: Any, **options: Any) -> Any:
        response = await self._client.send(node_id, request, **options)
        if hasattr(request, "topics") and hasattr(response, "topics"):
            self._give_up(request, response)
        return response

    def _give_up(self, request: Any, response: Any) -> None:
        for topic, partitions in response.topics:
            for index, answer in enumerate(partitions):
                if len(answer) < 5 or answer[1] != _CORRUPT_MESSAGE:
                    continue
                asked = {one[0]: one[1] for name, ones in request.topics if name == topic for one in ones}
                place = (topic, answer[0], asked.get(answer[0], -1))
                self._told[place] += 1
                if self._told[place] >= _ASKED_AGAIN:
                    del self._told[place]
                    partitions[index] = (answer[0], 0, *answer[2:-1], b"the broker answers CORRUPT_MESSAGE")


class _Fetcher(fetcher.Fetcher):  # type: ignore[misc]
    def __init__(self, client: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(_Client(client), *arguments, **options)


fetcher.MemoryRecords = Batches
fetcher.PartitionRecords = Unpacked
consumers.Fetcher = _Fetcher
