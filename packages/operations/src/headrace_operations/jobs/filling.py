"""Publishing of a job's experiences on its topic, resuming after an earlier process.

The experiences go to one partition, in an order that follows from the job alone, by a producer that neither duplicates
nor reorders records. So the topic always contains a prefix of the job's experiences, and its length is the position
at which to resume. Each record carries its position; a topic whose last record has another position is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from headrace.errors import HeadraceError
from headrace.topics import Range, Topics, connected
from headrace_operations.jobs.checking import CheckedRows
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.jobs.journal import JobJournal
from headrace_operations.jobs.written_experiences import experiences, row_order
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience

POSITION_HEADER = "headrace_place"
"""Position of a record among those of its job, starting at 0, in decimal digits."""
_BATCH_RECORDS = 200
Tick = Callable[[str, int, int], None]


async def fill_topic(prepared: PreparedJob, journal: JobJournal, bus: str, topic: str, total: int, tick: Tick) -> int:
    """Publish the missing experiences. Return the total number of experiences, all of which the topic then has.

    Raises:
        HeadraceError: the topic has records that are not of this job.
    """
    async with connected(bus) as topics:
        written = await _count_written(topics, topic)
    blobs = BlobStore(_blobs_url(prepared))
    producer = EventProducer(prepared.overrides.bus_settings(bus), "headrace/train", blobs)
    await producer.start()
    position = -1
    try:
        batch: list[Outgoing] = []
        for position, event in enumerate(_events(prepared, journal)):
            if position < written:
                continue
            record = await producer.encode(event, partition=0)
            header = (POSITION_HEADER, str(position).encode())
            batch.append(replace(record, topic=topic, headers=(*record.headers, header)))
            if len(batch) >= _BATCH_RECORDS:
                await producer.send_raw(batch)
                batch = []
                tick("writing experiences", position + 1, total)
        await producer.send_raw(batch)
    finally:
        await producer.stop()
    if written > position + 1:
        raise HeadraceError(
            f"topic {topic} has {written} records, but the job has {position + 1} experiences; "
            "choose another lineage with --lineage"
        )
    return position + 1


async def _count_written(topics: Topics, topic: str) -> int:
    """Return the number of records of the job that the topic has.

    Raises:
        HeadraceError: the last record is not of this job.
    """
    end = (await topics.ends([topic]))[topic][0]
    if not end:
        return 0
    async for record in topics.records(Range(topic, from_offset=end - 1)):
        mark = next((value for name, value in record.headers if name == POSITION_HEADER), None)
        if mark == str(end - 1).encode():
            return end
    raise HeadraceError(
        f"topic {topic} does not contain the experiences of this job; start the job under another name (--lineage)"
    )


def _events(prepared: PreparedJob, journal: JobJournal) -> Iterator[Experience]:
    assert journal.base is not None
    job, rows = prepared.job, CheckedRows(prepared.file_path(".rows"))
    for epoch in range(job.epochs):
        positions = row_order(len(rows), epoch, job.seed, shuffle=job.shuffle)
        for _, row in rows.read(iter(positions)):
            yield from experiences(row, epoch, model=prepared.model, version=journal.base, time=journal.begun)


def _blobs_url(prepared: PreparedJob) -> str:
    return str(prepared.overrides.get("blobs.url") or (prepared.data_dir / "blobs").as_uri())
