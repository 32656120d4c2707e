"""State of producers in partitions, by which a repeated batch is stored only once.

Clients have at most five batches in flight, so the last five are remembered, as in Kafka.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from headrace_broker.batch import RecordBatch
from headrace_broker.errors import Code, Rejected

REMEMBERED = 5
SEQUENCES = 1 << 31
"""Number of sequence numbers, which count from 0 and wrap around."""
_SENT = struct.Struct(">iiq")


@dataclass(slots=True)
class ProducerState:
    """State of one producer in one partition.

    `open_from` is the first offset of its open transaction, None without one.
    """

    epoch: int
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """First sequence, last sequence and base offset of the last batches, the oldest first."""
    open_from: int | None = None
    seen_ms: int = 0

    def duplicate_of(self, batch: RecordBatch) -> int | None:
        """Return the base offset at which the batch is already stored, or None if it is the producer's next batch.

        Raises `Rejected` for an old epoch (47) and for a gap in the sequence numbers (45).
        """
        if batch.producer_epoch < self.epoch:
            raise Rejected(Code.INVALID_PRODUCER_EPOCH, f"epoch {batch.producer_epoch} is fenced by epoch {self.epoch}")
        first, last = sequence_range(batch)
        if batch.producer_epoch > self.epoch:
            if first != 0:
                raise Rejected(Code.OUT_OF_ORDER_SEQUENCE, f"sequence {first}: a new epoch must begin at 0")
            return None
        for stored_first, stored_last, offset in self.recent:
            if (stored_first, stored_last) == (first, last):
                return offset
        expected = (self.recent[-1][1] + 1) % SEQUENCES if self.recent else first
        if first != expected:
            raise Rejected(Code.OUT_OF_ORDER_SEQUENCE, f"sequence {first}, expected {expected}")
        return None

    def note(self, batch: RecordBatch, offset: int, now_ms: int) -> None:
        """Record that `batch` is stored at `offset`."""
        if batch.producer_epoch != self.epoch:
            self.epoch = batch.producer_epoch
            self.recent.clear()
        self.recent.append((*sequence_range(batch), offset))
        self.seen_ms = now_ms
        if batch.transactional and self.open_from is None:
            self.open_from = offset

    def packed(self) -> bytes:
        """Return `recent` as bytes, for its column in the file."""
        return b"".join(_SENT.pack(*sent) for sent in self.recent)

    @classmethod
    def unpacked(cls, epoch: int, recent: bytes, open_from: int | None, seen_ms: int) -> ProducerState:
        """Restore a state from the columns of its row."""
        return cls(epoch, deque(_SENT.iter_unpack(recent), REMEMBERED), open_from, seen_ms)


def sequence_range(batch: RecordBatch) -> tuple[int, int]:
    """Return the first and the last sequence number of a batch."""
    return batch.base_sequence, (batch.base_sequence + batch.last_offset_delta) % SEQUENCES
