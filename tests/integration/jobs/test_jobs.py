"""Tests of training jobs on rows of files.

A job continues where its topic ends: interrupted at any record, it writes equal bytes in equal order, also if killed in
any part. `headrace train --check` names invalid rows by their number and counts the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, connected
from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.filling import POSITION_HEADER, fill_topic
from headrace_operations.jobs.job import Job, JobJournal, PreparedJob, prepare
from headrace_operations.replay import copying
from headrace_runtime.registries import Registry
from headrace_schemas import Experience
from headrace_schemas.programs import WrittenBranch, WrittenSpan
from headrace_schemas.values.base import utcnow
from tests.jobs.program import (
    Workplace,
    case_of,
    differences,
    killed,
    manifests,
    moments,
    set_aside,
    to_the_end,
    written,
)
from tests.support import tiny_model
from tests.support.seeds import draw_seed

ROWS, EPOCHS = 700, 2
Records = list[tuple[bytes | None, bytes | None, bytes | None]]


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
            fill_topic(prepared, progress_journal, bus, topic, 0, lambda activity, count, total: None)
        )
        await asyncio.wait([work], timeout=draw.random())
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    assert (
        await fill_topic(prepared, progress_journal, bus, topic, 0, lambda activity, count, total: None)
        == ROWS * EPOCHS
    )
    return await records(bus, topic)


async def test_a_topic_that_was_interrupted_holds_the_same(prepared: PreparedJob, empty_bus: str) -> None:
    progress_journal = journal(prepared)
    uninterrupted = await filled(prepared, empty_bus, "whole", progress_journal, 0)
    assert [int(position or b"-1") for *_, position in uninterrupted] == list(range(ROWS * EPOCHS))
    assert len({Experience.from_json(value or b"").experience_id for _, value, _ in uninterrupted}) == ROWS * EPOCHS
    assert await filled(prepared, empty_bus, "parts", progress_journal, 6) == uninterrupted
    assert await filled(prepared, empty_bus, "whole", progress_journal, 0) == uninterrupted, (
        "what is full stays as it is"
    )


async def test_what_somebody_else_wrote_is_no_beginning(prepared: PreparedJob, empty_bus: str) -> None:
    progress_journal = journal(prepared)
    await copying.ensure(empty_bus, "foreign")
    async with producing(empty_bus) as producer:
        await producer.send([Outgoing("replay-foreign-experiences", b"k", b"{}", (), 0)])
    with pytest.raises(HeadraceError, match="does not contain the experiences of this job"):
        await filled(prepared, empty_bus, "foreign", progress_journal, 0)


PROGRAM = "from headrace_cli.app import main; main()"
GOOD = {"prompt": "Who sent it?", "completion": "the agent"}
MIXED_ROWS: list[Any] = [
    GOOD,
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 7},
    {"prompt": "empty", "completion": "  "},
    "no row",
    GOOD,
    {"prompt": "long", "completion": "word " * 3000},
    {"messages": [{"role": "assistant", "content": "b"}]},
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"prompt": "think", "completion": [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]},
    {"prompt": "better", "chosen": "x", "rejected": "y"},
]
BAD = {3: "empty", 4: "json", 5: "duplicate", 6: "too_long", 7: "order", 8: "held_out", 9: "template"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checking")
    tiny_model.build(root / "base", layers=1)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MIXED_ROWS))
    (root / "held_out.jsonl").write_text('{"question": "What is 2 + 2?"}\n')
    return root


def train(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "train", "reinforce++", "rows.jsonl", "--base", "base", *more]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.timeout(400)
@pytest.mark.long
def test_bad_rows_are_named_with_their_reasons(folder: Path) -> None:
    process = train(folder, "--check", "--json", "--held-out", "held_out.jsonl")
    assert process.returncode == 1, process.stderr
    report = json.loads(process.stdout)
    assert {refusal["row"]: refusal["kind"] for refusal in report["refusals"]} == BAD
    assert (report["rows"], report["kept"], report["experiences"], report["unread"]) == (10, 3, 4, {"id": 1})
    assert report["tokens_max"] == 2048
    assert not (folder / ".headrace" / "jobs").exists(), "looking leaves nothing"


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_preview_shows_what_is_trained_and_a_job_with_bad_rows_stops(folder: Path) -> None:
    process = train(folder, "--preview", "1", "--skip-bad", "7", "--held-out", "held_out.jsonl")
    assert process.returncode == 0, process.stderr
    assert "<|im_start|>assistant\n⟦the agent<|im_end|>⟧" in process.stdout
    process = train(folder, "--skip-bad", "5")
    assert process.returncode == 2
    assert "6 of 10 rows cannot be trained, but --skip-bad allows 5" in process.stderr
    assert "rows.jsonl, row 3: message 2 with role assistant is empty" in process.stderr


ANNOUNCED = Registry("algorithms", object, "algorithm").names()


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_a_killed_job_ends_with_the_same_bytes(tmp_path: Path) -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    case = case_of(300, seed)
    base, rows = tiny_model.build(tmp_path / "base", layers=1), written(case, tmp_path / "rows.jsonl")
    disturbed = Workplace(tmp_path / "work", base, rows)
    journal = to_the_end(case, disturbed)
    assert journal.trained == 300
    quiet = set_aside(disturbed, tmp_path / "quiet")
    log = killed(case, disturbed, moments(draw, 5, len(manifests(quiet))), draw)
    assert sum(kill["killed"] for kill in log) >= 4, log
    assert differences(quiet, disturbed) == [], log
    assert to_the_end(case, disturbed).version == journal.version, "a job that is done says so again"


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_a_planted_difference_is_noticed(tmp_path: Path) -> None:
    seed = 1
    case, other = case_of(70, seed), case_of(70, seed + 1)
    base = tiny_model.build(tmp_path / "base", layers=1)
    work = Workplace(tmp_path / "work", base, written(case, tmp_path / "rows.jsonl"))
    to_the_end(case, work)
    first = set_aside(work, tmp_path / "one")
    to_the_end(other, replace(work, rows=written(other, tmp_path / "others.jsonl")))
    assert any("version" in line for line in differences(first, work))
