"""A job's topic is filled from where it ends: interrupted at any record, it holds the same bytes in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, connected
from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.filling import POSITION_HEADER, fill_topic
from headrace_operations.jobs.job import Job, PreparedJob, prepare
from headrace_operations.jobs.journal import JobJournal
from headrace_operations.replay import copying
from headrace_schemas import Experience
from headrace_schemas.programs.models import WrittenBranch, WrittenSpan
from headrace_schemas.values.base import utcnow
from tests.support.broker_process import BrokerProcess

ROWS, EPOCHS = 700, 2
Records = list[tuple[bytes | None, bytes | None, bytes | None]]


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedJob:
    """Return the job in the state after its checks."""
    (tmp_path / "base").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    job = Job("reinforce++", tmp_path / "rows.jsonl", base=tmp_path / "base", data_dir=tmp_path / "data", epochs=EPOCHS)
    job_prepared = prepare(job, {})
    path = job_prepared.file_path(".rows")
    path.parent.mkdir(parents=True)
    branch = WrittenBranch(token_ids=(1, 2, 3), spans=(WrittenSpan(start=1, length=2, message=1),))
    rows = [CheckedRow(file="a" * 64, row=n + 1, prompt=f"{n:064x}", answers=((branch,),)) for n in range(ROWS)]
    path.write_bytes(b"".join(row.model_dump_json(exclude_none=True).encode() + b"\n" for row in rows))
    return job_prepared


def journal(prepared: PreparedJob) -> JobJournal:
    return JobJournal.begin(prepared, utcnow()).model_copy(update={"base": "m@0123456789abcdef"})


async def records(bus: str, topic: str) -> Records:
    async with connected(bus) as topics:
        all_records = [record async for record in topics.records(Range(topic))]
    return [
        (kafka_record.key, kafka_record.value, dict(kafka_record.headers).get(POSITION_HEADER))
        for kafka_record in all_records
    ]


async def filled(
    prepared: PreparedJob, bus: str, lineage: str, progress_journal: JobJournal, interruptions: int
) -> Records:
    await copying.ensure(bus, lineage)
    await copying.ensure(bus, lineage)  # whoever was killed after this does it again
    topic = f"replay-{lineage}-experiences"
    draw = random.Random(lineage)
    for _ in range(interruptions):
        work = asyncio.create_task(
            fill_topic(prepared, progress_journal, bus, topic, 0, lambda doing, count, total: None)
        )
        await asyncio.wait([work], timeout=draw.random())
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    assert (
        await fill_topic(prepared, progress_journal, bus, topic, 0, lambda doing, count, total: None) == ROWS * EPOCHS
    )
    return await records(bus, topic)


async def test_a_topic_that_was_interrupted_holds_the_same(prepared: PreparedJob, bus: str) -> None:
    progress_journal = journal(prepared)
    uninterrupted = await filled(prepared, bus, "whole", progress_journal, 0)
    assert [int(position or b"-1") for *_, position in uninterrupted] == list(range(ROWS * EPOCHS))
    assert len({Experience.from_json(value or b"").experience_id for _, value, _ in uninterrupted}) == ROWS * EPOCHS
    assert await filled(prepared, bus, "parts", progress_journal, 6) == uninterrupted
    assert await filled(prepared, bus, "whole", progress_journal, 0) == uninterrupted, "what is full stays as it is"


async def test_what_somebody_else_wrote_is_no_beginning(prepared: PreparedJob, bus: str) -> None:
    progress_journal = journal(prepared)
    await copying.ensure(bus, "foreign")
    async with producing(bus) as producer:
        await producer.send([Outgoing("replay-foreign-experiences", b"k", b"{}", (), 0)])
    with pytest.raises(HeadraceError, match="does not contain the experiences of this job"):
        await filled(prepared, bus, "foreign", progress_journal, 0)
