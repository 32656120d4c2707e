"""Puts a job's experiences on its topic, from where an earlier process has stopped.

They go to one partition, in an order that follows from the job alone, by a producer that never doubles or reorders what
it sends. So what is on the topic is always the beginning of what belongs there, and its length says what is missing.
Each record carries its place, and the last one is looked at: a topic that holds something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from headrace.errors import HeadraceError
from headrace.topics import Range, Topics, connected
from headrace_operations.jobs.checking import CheckedRows
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.jobs.journal import JobJournal
from headrace_operations.jobs.written_experiences import experiences, order
from headrace_runtime.blobs import BlobStore
from headrace_runtime.producer import EventProducer
from headrace_runtime.wire import Outgoing
from headrace_schemas import Experience

PLACE_HEADER = "headrace_place"
"""The place of a record among those of its job, from 0 on (decimal)."""
_SEND_AT_ONCE = 200
Tick = Callable[[str, int, int], None]


async def fill(prepared: PreparedJob, journal: JobJournal, bus: str, topic: str, total: int, tick: Tick) -> int:
    """Send what is missing. Returns how many experiences the topic has then, which are all of them."""
    async with connected(bus) as topics:
        there = await _there(topics, topic)
    blobs = BlobStore(_blobs_url(prepared))
    producer = EventProducer(prepared.overrides.bus_settings(bus), "headrace/train", blobs)
    await producer.start()
    place = -1
    try:
        waiting: list[Outgoing] = []
        for place, event in enumerate(_events(prepared, journal)):
            if place < there:
                continue
            record = await producer.encode(event, partition=0)
            mark = (PLACE_HEADER, str(place).encode())
            waiting.append(replace(record, topic=topic, headers=(*record.headers, mark)))
            if len(waiting) >= _SEND_AT_ONCE:
                await producer.send_raw(waiting)
                waiting = []
                tick("writing experiences", place + 1, total)
        await producer.send_raw(waiting)
    finally:
        await producer.stop()
    if there > place + 1:
        raise HeadraceError(
            f"topic {topic} holds {there} records, and the job has {place + 1} experiences; name another lineage"
        )
    return place + 1


async def _there(topics: Topics, topic: str) -> int:
    """Records of the job that the topic has. Raises `HeadraceError` for a topic that is not the job's."""
    end = (await topics.ends([topic]))[topic][0]
    if not end:
        return 0
    async for record in topics.records(Range(topic, from_offset=end - 1)):
        mark = next((value for name, value in record.headers if name == PLACE_HEADER), None)
        if mark == str(end - 1).encode():
            return end
    raise HeadraceError(
        f"topic {topic} does not hold what this job has written so far; begin again under another name (--lineage)"
    )


def _events(prepared: PreparedJob, journal: JobJournal) -> Iterator[Experience]:
    assert journal.base is not None
    job, rows = prepared.job, CheckedRows(prepared.place(".rows"))
    for epoch in range(job.epochs):
        places = order(len(rows), epoch, job.seed, shuffle=job.shuffle)
        for _, row in rows.read(iter(places)):
            yield from experiences(row, epoch, model=prepared.model, version=journal.base, time=journal.begun)


def _blobs_url(prepared: PreparedJob) -> str:
    return str(prepared.overrides.get("blobs.url") or (prepared.data_dir / "blobs").as_uri())
