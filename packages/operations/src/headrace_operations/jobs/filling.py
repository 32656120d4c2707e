"""Conversion of a job's tokenized rows to experiences, and their publishing on the job's topic, resuming after an
earlier process.

The experiences go to one partition, in an order that follows from the job alone, by a producer that neither duplicates
nor reorders records. So the topic always contains a prefix of the job's experiences, and its length is the position
at which to resume. Each record carries its position; a topic whose last record has another position is refused.

Ids are derived from the digest of the file, the row number and the epoch, so they are unique, and a row that is
published again after a crash is a redelivery.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from headrace.errors import HeadraceError
from headrace.topics import Range, Topics, connected
from headrace_operations.jobs.checking import CheckedRow, CheckedRows
from headrace_operations.jobs.job import JobJournal, PreparedJob
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Branch, Experience
from headrace_schemas.events.trajectory import PreferenceSide, Span
from headrace_schemas.programs import WrittenBranch
from headrace_schemas.values.ids import derived_id, session_key

_TENANT = "default"
_SIDES = ("chosen", "rejected")
POSITION_HEADER = "headrace_place"
"""Position of a record among those of its job, starting at 0, in decimal digits."""
_BATCH_RECORDS = 200
Tick = Callable[[str, int, int], None]


def row_order(rows: int, epoch: int, seed: int, *, shuffle: bool) -> list[int]:
    """Return the positions of a data set's rows in the order in which an epoch trains them."""
    positions = list(range(rows))
    if shuffle:
        random.Random(f"rows {seed} {epoch}").shuffle(positions)
    return positions


def experiences(row: CheckedRow, epoch: int, *, model: str, version: str, time: datetime) -> Iterator[Experience]:
    """Yield the experiences of one row in one epoch. `version` is the first version of the lineage."""
    pair = derived_id("written-preference", row.file, row.row, epoch) if len(row.answers) > 1 else None
    for side, branches in enumerate(row.answers):
        run = derived_id("written-run", row.file, row.row, epoch, side)
        session = f"{row.file[:16]}-{row.row}-{epoch}-{side}"
        for index, written in enumerate(branches):
            branch = _branch(written, run, version)
            preferences = (_preference_side(pair, side, branch),) if pair else ()
            reward = _reward(row, paired=pair is not None)
            yield Experience(
                time=time,
                experience_id=Experience.id_of(run, index),
                trajectory_id=run,
                session_key=session_key(_TENANT, session),
                session_id=session,
                task_id=f"row-{row.prompt[:32]}-{epoch}",
                run_id=run,
                model=model,
                branch_index=index,
                branch=branch,
                turn_ids=branch.turn_ids,
                weight=1 / len(branches),
                reward=reward,
                no_reward="no_reward" if reward is None else None,
                preferences=preferences,
                origin="written",
            )


def _reward(row: CheckedRow, *, paired: bool) -> float | None:
    """Return the reward in a row: its number, or 1 for a good and 0 for a bad label, or None if it has neither.

    Rows with a preference have no reward, because only the comparison counts.
    """
    if paired:
        return None
    if row.reward is not None:
        return row.reward
    return None if row.label is None else float(row.label)


def _preference_side(pair: str, index: int, branch: Branch) -> PreferenceSide:
    last = branch.spans[-1]
    return PreferenceSide(preference_id=pair, side=_SIDES[index], turn_id=last.turn_id, source="written")


def _branch(written: WrittenBranch, run: str, version: str) -> Branch:
    spans: Sequence[Span] = tuple(
        Span(
            start=span.start,
            logprobs=(0.0,) * span.length,
            turn_id=derived_id("written-turn", run, span.message),
            version=version,
        )
        for span in written.spans
    )
    return Branch(token_ids=written.token_ids, spans=tuple(spans))


async def fill_topic(prepared: PreparedJob, journal: JobJournal, bus: str, topic: str, total: int, tick: Tick) -> int:
    """Publish the job's experiences that the topic lacks, and return the total number of experiences.

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
    """Return the number of the job's records that are on the topic.

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
