"""Replacement of a class of aiokafka so that consumers skip damaged record batches and dead-letter them.

aiokafka's own consumer, and Faust's on top of it, raise `CorruptRecordException` for a batch with a wrong checksum, and
again at every further poll, because the position does not advance. Importing this module replaces the class that
unpacks fetched bytes. A batch with a wrong checksum, a batch that cannot be decompressed or parsed, and a response
CORRUPT_MESSAGE of the broker become one record with the header `headrace_damage`. `wire.decode` refuses that record, so
the consumer dead-letters it with its offset, as it does with any other invalid record.
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
_CORRUPT_RESPONSES = 3
"""Number of consecutive responses CORRUPT_MESSAGE after which the batch counts as damaged."""


class Batches:
    """Record batches of a fetch response, in place of aiokafka's `MemoryRecords`.

    After an error in a batch, `resume` returns the offset at which the consumer continues.
    """

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._next = 0
        self._at = 0

    def size_in_bytes(self) -> int:
        return len(self._data)

    def has_next(self) -> bool:
        """Return whether the response contains another complete batch. The last one may be cut (KIP-74); only the first
        batch is returned if cut."""
        return self._next < len(self._data) and (self._next == 0 or self._is_complete(self._next))

    def next_batch(self) -> Any:
        self._at = self._next
        if not self._is_complete(self._at):
            self._next = len(self._data)
            raise CorruptRecordException("the length in its header is not that of a batch")
        self._next = self._end(self._at)
        return MemoryRecords(self._data[self._at : self._next]).next_batch()

    def last_bytes(self) -> bytes:
        """Return the first bytes, at most `_KEPT_BYTES_MAX`, of the batch that was read last."""
        return self._data[self._at : self._next][:_KEPT_BYTES_MAX]

    def resume(self, position: int) -> int:
        """Return the offset at which the consumer continues after a damaged batch.

        If the next batch in the response is intact, it is that batch's first offset. Otherwise the header of the
        damaged batch gives it, if its number of records agrees with its last offset. Otherwise only `position` is
        skipped.

        Args:
            position: the offset from which the consumer was reading. It lies in the damaged batch or after its
                beginning.
        """
        if self._next < len(self._data) and self._is_complete(self._next):
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

    def _is_complete(self, at: int) -> bool:
        return len(self._data) - at > _OVERHEAD and at + _OVERHEAD < self._end(at) <= len(self._data)


class Unpacked(fetcher.PartitionRecords):  # type: ignore[misc]
    """Iterator over the records of a fetch response, in place of aiokafka's `PartitionRecords`. It continues after a
    damaged batch."""

    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        while True:
            try:
                yield from super()._unpack_records()
            except Exception as error:  # noqa: BLE001 (damaged bytes can make a parser raise anything)
                yield self._damage_record(error)
            else:
                return

    def _damage_record(self, error: Exception) -> ConsumerRecord:
        at = self.next_fetch_offset
        self.next_fetch_offset = self._records.resume(at)
        reason = f"offsets {at} to {self.next_fetch_offset - 1}: {type(error).__name__}: {error}"
        value = self._records.last_bytes()
        headers = ((HEADER, reason[:1000].encode()),)
        return ConsumerRecord(self._tp.topic, self._tp.partition, at, 0, 0, None, value, None, -1, len(value), headers)


class _Client:
    """Client of aiokafka's fetcher that replaces repeated responses CORRUPT_MESSAGE by bytes that count as a damaged
    batch."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._corrupt_responses: Counter[tuple[str, int, int]] = Counter()
        """Number of responses CORRUPT_MESSAGE by topic, partition and fetch offset."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node_id: int, request: Any, **options: Any) -> Any:
        response = await self._client.send(node_id, request, **options)
        if hasattr(request, "topics") and hasattr(response, "topics"):
            self._replace_corrupt(request, response)
        return response

    def _replace_corrupt(self, request: Any, response: Any) -> None:
        for topic, partitions in response.topics:
            for index, answer in enumerate(partitions):
                if len(answer) < 5 or answer[1] != _CORRUPT_MESSAGE:
                    continue
                requested = {
                    partition[0]: partition[1]
                    for name, requested_partitions in request.topics
                    if name == topic
                    for partition in requested_partitions
                }
                position = (topic, answer[0], requested.get(answer[0], -1))
                self._corrupt_responses[position] += 1
                if self._corrupt_responses[position] >= _CORRUPT_RESPONSES:
                    del self._corrupt_responses[position]
                    partitions[index] = (answer[0], 0, *answer[2:-1], b"the broker answers CORRUPT_MESSAGE")


class _Fetcher(fetcher.Fetcher):  # type: ignore[misc]
    def __init__(self, client: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(_Client(client), *arguments, **options)


fetcher.MemoryRecords = Batches
fetcher.PartitionRecords = Unpacked
consumers.Fetcher = _Fetcher
