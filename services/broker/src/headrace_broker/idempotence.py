"""The state of a producer in a partition, so that a batch that is sent twice is stored once.

Clients keep at most five batches in flight, so five are remembered, as in Kafka.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from headrace_broker.batch import RecordBatch
from headrace_broker.errors import Code, Rejected

REMEMBERED = 5
SEQUENCES = 1 << 31
"""Sequence numbers count from 0 and wrap here."""
_SENT = struct.Struct(">iiq")


@dataclass(slots=True)
class ProducerState:
    """One producer in one partition. `open_from` is where its open transaction begins."""

    epoch: int
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """First sequence, last sequence, base offset; oldest first."""
    open_from: int | None = None
    seen_ms: int = 0

    def duplicate_of(self, batch: RecordBatch) -> int | None:
        """The base offset at which this batch is stored already; None when it is the next one.

        Raises `Rejected` for an old epoch (47) and for a gap in the sequence (45).
        """
        if batch.producer_epoch < self.epoch:
            raise Rejected(Code.INVALID_PRODUCER_EPOCH, f"epoch {batch.producer_epoch}, now {self.epoch}")
        first, last = span(batch)
        if batch.producer_epoch > self.epoch:
            if first != 0:
                raise Rejected(Code.OUT_OF_ORDER_SEQUENCE, f"a new epoch starts at 0, not at {first}")
            return None
        for known_first, known_last, offset in self.recent:
            if (known_first, known_last) == (first, last):
                return offset
        expected = (self.recent[-1][1] + 1) % SEQUENCES if self.recent else first
        if first != expected:
            raise Rejected(Code.OUT_OF_ORDER_SEQUENCE, f"sequence {first}, expected {expected}")
        return None

    def note(self, batch: RecordBatch, offset: int, now_ms: int) -> None:
        """Remember that `batch` is stored at `offset`."""
        if batch.producer_epoch != self.epoch:
            self.epoch = batch.producer_epoch
            self.recent.clear()
        self.recent.append((*span(batch), offset))
        self.seen_ms = now_ms
        if batch.transactional and self.open_from is None:
            self.open_from = offset

    def packed(self) -> bytes:
        return b"".join(_SENT.pack(*sent) for sent in self.recent)

    @classmethod
    def unpacked(cls, epoch: int, recent: bytes, open_from: int | None, seen_ms: int) -> ProducerState:
        return cls(epoch, deque(_SENT.iter_unpack(recent), REMEMBERED), open_from, seen_ms)


def span(batch: RecordBatch) -> tuple[int, int]:
    """First and last sequence number of a batch."""
    return batch.base_sequence, (batch.base_sequence + batch.last_offset_delta) % SEQUENCES
