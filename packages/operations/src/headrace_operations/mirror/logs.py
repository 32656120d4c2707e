"""Copies a partition of a log so that every record keeps its offset."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace_operations.mirror.side import NotACopy, Row, Side
from headrace_schemas import EVENTS

if TYPE_CHECKING:
    from aiokafka import TopicPartition

Passed = Callable[[int], None]
"""Called with how many more records were dealt with."""
PADDING = b"headrace-mirror-padding"
_AT_ONCE_MAX = 500
_BYTES_AT_ONCE_MAX = 8_388_608
_PADDING_AT_ONCE = 100_000
_PADDING_TIME_MS = 1


@dataclass(frozen=True, slots=True)
class Checked:
    """What a partition holds on both sides: records, and a digest of their offsets, times, keys, values, headers."""

    topic: str
    partition: int
    records: int
    digest: str


async def copy(source: Side, target: Side, place: TopicPartition, end: int, passed: Passed) -> None:
    """Bring the target's partition up to offset `end` of the source's.

    What is there already is compared with the source first. Raises `NotACopy`.
    """
    first = await _first_record(source, place, end)
    begun, reached = (await target.bounds([place]))[place]
    if reached > end:
        raise NotACopy(
            f"{_name(place)} ends at {reached} on {target.bus} and at {end} on {source.bus}: the target is in use "
            "already, or another bus was copied there. To copy again, delete the topic there first"
        )
    if reached <= first:
        await _check_padding(target, place, begun, reached)
        passed(reached - begun)
        await _pad(target, place, reached, first, passed)
        if begun < first:
            await target.delete_before(place, first)
        reached = first
    else:
        await compare(source, target, place, reached, passed)
    await _append(source, target, place, reached, end, passed)


async def compare(source: Side, target: Side, place: TopicPartition, end: int, passed: Passed) -> Checked:
    """Read both sides up to `end`, from where both have records. Raises `NotACopy` at the first difference."""
    oldest = (await target.bounds([place]))[place][0]
    start = await _first_record(source, place, end, oldest)
    theirs, digest, count = target.read(place, start, end), hashlib.sha256(), 0
    async for offset, row in _filled(source, place, start, end):
        found = await anext(theirs, None)
        if found != (offset, row):
            raise NotACopy(
                f"{_name(place)} at {offset}: {target.bus} holds other data than {source.bus}. Mirror to a bus without "
                f"a topic of this name, or delete the topic there first if nobody needs it"
            )
        digest.update(repr((offset, row)).encode())
        count += 1
        passed(1)
    return Checked(place.topic, place.partition, count, digest.hexdigest())


async def _append(source: Side, target: Side, place: TopicPartition, start: int, end: int, passed: Passed) -> None:
    """`start` is where the target ends."""
    before = None
    if start > (await target.bounds([place]))[place][0]:
        (before,) = [row async for _, row in target.read(place, start - 1, start)]
    waiting: list[Row] = []
    size, at = 0, start
    async for _, row in _filled(source, place, start, end, before):
        waiting.append(row)
        size += len(row.value or b"") + len(row.key or b"")
        if len(waiting) == _AT_ONCE_MAX or size > _BYTES_AT_ONCE_MAX:
            await target.append(place, waiting, at)
            passed(len(waiting))
            at, waiting, size = at + len(waiting), [], 0
    await target.append(place, waiting, at)
    passed(len(waiting))


async def _filled(
    source: Side, place: TopicPartition, start: int, end: int, before: Row | None = None
) -> AsyncIterator[tuple[int, Row]]:
    """Every offset of a range; one without a record has the record before it, which is `before` at the start.

    Raises `UsageError` where nobody knows what consumers make of a repetition: the topic is not one of ours.
    """
    expected = start
    async for offset, row in source.read(place, start, end):
        for missing in range(expected, offset):
            yield missing, _repeated(place, missing, before)
        yield offset, row
        expected, before = offset + 1, row
    for missing in range(expected, end):
        yield missing, _repeated(place, missing, before)


def _repeated(place: TopicPartition, offset: int, before: Row | None) -> Row:
    assert before is not None, "a range begins with a record"
    if place.topic not in EVENTS:
        raise UsageError(
            f"{_name(place)} has no record at {offset} (a transaction ended there), and only topics of Headrace are "
            f"known to bear a repetition in its place; leave this one out with --without {place.topic}"
        )
    return before


async def _first_record(source: Side, place: TopicPartition, end: int, from_offset: int = 0) -> int:
    """The offset of the first record from `from_offset` on, `end` when there is none."""
    start = max(from_offset, (await source.bounds([place]))[place][0])
    reading = source.read(place, start, end)
    try:
        async for offset, _ in reading:
            return offset
    finally:
        await reading.aclose()
    return end


async def _check_padding(target: Side, place: TopicPartition, begun: int, reached: int) -> None:
    """What is below the source's first record was put there by us, or has been on the source until it expired."""
    async for offset, row in target.read(place, begun, reached):
        if row.key != PADDING:
            raise NotACopy(
                f"{_name(place)} at {offset}: {target.bus} holds data that is not on the source, or is not there any "
                "more. Delete the topic there first if nobody needs it"
            )


async def _pad(target: Side, place: TopicPartition, start: int, end: int, passed: Passed) -> None:
    """Fill up with records that are deleted before anything else comes; old ones, so that they share no segment."""
    row = Row(PADDING, None, (), _PADDING_TIME_MS)
    for at in range(start, end, _PADDING_AT_ONCE):
        count = min(_PADDING_AT_ONCE, end - at)
        await target.append_repeated(place, row, count, at)
        passed(count)


def _name(place: TopicPartition) -> str:
    return f"{place.topic}[{place.partition}]"
