"""Retrying and discarding of dead letters, recorded as decisions with the name of the user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace_console.read_model.follower import RecordReader
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queries import Row, position_of
from headrace_runtime.clock import Clock
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record, decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.tables import portions
from headrace_schemas import DeadLetter, DeadLetterDecision
from headrace_schemas.rules.training import permanent_problem, retry_headers

_READ_AT_ONCE = 100
_EXPIRED = "its record has expired"


@dataclass(frozen=True, slots=True)
class PlannedLetter:
    """A dead letter, and the problem that prevents its retry, or None."""

    row: Row
    letter: DeadLetter | None = None
    """Content of the letter, if an action needs it."""
    problem: str | None = None


class DeadLetterActions:
    """Client that plans and executes retries and discards of dead letters. Its producer connects at the first one."""

    def __init__(self, records: RecordReader, producer: EventProducer, blobs: BlobStore, clock: Clock) -> None:
        self._records = records
        self._producer = producer
        self._blobs = blobs
        self._clock = clock
        self._lock = asyncio.Lock()
        self._is_connected = False

    async def plan_retry(self, rows: Sequence[Row]) -> AsyncIterator[PlannedLetter]:
        """Yield each letter with the problem that prevents a retry. The plan publishes no record.

        Raises:
            Unavailable: the bus does not answer.
        """
        for part in portions(rows, _READ_AT_ONCE):
            events = await self._records.read(DeadLetter.topic, [position_of(row) for row in part])
            for row in part:
                letter = events.get(position_of(row))
                if isinstance(letter, DeadLetter):
                    yield PlannedLetter(row, letter, await self._problem(letter))
                else:
                    yield PlannedLetter(row, problem=_EXPIRED)

    async def _problem(self, letter: DeadLetter) -> str | None:
        problem = permanent_problem(letter)
        if problem is not None:
            return problem
        try:
            await decode(_record_of(letter), self._blobs)
        except (InvalidEvent, Unavailable) as error:
            return f"would be refused again: {error}"
        return None

    async def retry(self, letters: Sequence[PlannedLetter], by: str) -> None:
        """Publish the records of letters again, and then the decisions.

        Args:
            letters: letters in which `plan_retry` found no problem.
            by: name of the user.

        Raises:
            Unavailable: the bus does not answer. Some records may have been published; consumers recognize their ids.
        """
        if letters:
            await self._connect()
            records = [await self._restore(planned.letter) for planned in letters if planned.letter is not None]
            await self._producer.send_raw(records)
            await self._decide([planned.row for planned in letters], "retried", None, by)

    async def discard(self, rows: Sequence[Row], reason: str, by: str) -> None:
        """Record that letters will not be retried. Raises `Unavailable` if the bus does not answer."""
        if rows:
            await self._connect()
            await self._decide(rows, "discarded", reason, by)

    async def _restore(self, letter: DeadLetter) -> Outgoing:
        """Return the refused record. A record that never was on a topic gets the key of its event."""
        partitions = await self._producer.partitions(letter.source_topic)
        partition = letter.source_partition if letter.source_partition in partitions else None
        if letter.source_key:
            key = letter.source_key.encode()
        else:
            key = (await decode(_record_of(letter), self._blobs)).event.key.encode()
        headers = retry_headers(letter, keeps_partition=partition is not None)
        return Outgoing(letter.source_topic, key, letter.value, headers, partition)

    async def _decide(
        self,
        rows: Sequence[Row],
        action: Literal["retried", "discarded"],
        reason: str | None,
        by: str,
    ) -> None:
        decisions = [
            DeadLetterDecision(
                time=self._clock.now(),
                dead_letter_id=unpack_id(row["name"]),
                number=row["decisions"] + 1,
                action=action,
                reason=reason,
                by=by,
            )
            for row in rows
        ]
        await self._producer.send_raw([await self._producer.encode(decision) for decision in decisions])

    async def _connect(self) -> None:
        async with self._lock:
            if not self._is_connected:
                await self._producer.start()
                self._is_connected = True

    async def close(self) -> None:
        """Disconnect."""
        await self._producer.stop()


def _record_of(letter: DeadLetter) -> Record:
    headers = tuple((name, text.encode()) for name, text in letter.headers.items())
    key = letter.source_key.encode() if letter.source_key else None
    return Record(letter.source_topic, 0, 0, key, letter.value, headers)
