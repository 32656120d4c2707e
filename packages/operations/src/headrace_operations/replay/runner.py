"""Planning, running and resuming of replays, and comparison of their batches with the original ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from headrace.errors import HeadraceError, UsageError
from headrace.producing import producing
from headrace.topics import connected
from headrace_operations.catalog import base_folder
from headrace_operations.replay import copying, partition_merge, program
from headrace_operations.replay.partition_merge import Journal, PartitionMerge, open_merge
from headrace_operations.replay.pipeline import Item, Pipeline, Tick, choose_cut, run_together
from headrace_operations.replay.program import Program, start_program
from headrace_operations.replay.request import Report, Request
from headrace_runtime.storage import disk
from headrace_schemas.programs import DryRunLine


class CopyState(BaseModel):
    """State of a replay whose copy is complete, from which it can be resumed: the file `replays/<lineage>.json`."""

    of: str
    recorded: bool
    experiences: int

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace_file(path, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return cls.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None


async def plan(request: Request, tick: Tick) -> Report:
    """Return the report that `run` would return.

    No record is written, but reward functions and the judge are called.
    """
    report = _report(request)
    journal_of_lineage = await _journal(request)
    async with open_merge(request.bus, request.topic_range) as merge:
        choose_cut(request, report, journal_of_lineage, merge)
        base = await asyncio.to_thread(base_folder, request.overrides)
        job = {"replays": request.of, "cut": report.cut}
        environ = request.environ(base=base, lineage=request.lineage, job=job)
        async with start_program("trainer", environ) as dry_run:

            async def feed() -> None:
                for batch in journal_of_lineage.recorded if report.cut == "recorded" else ():
                    await dry_run.feed("recorded", batch.model_dump_json().encode())
                await Pipeline(request, report, lambda item: _feed(dry_run, item), tick).run(merge, journal_of_lineage)
                dry_run.close()

            async def drain() -> None:
                async for _, value in dry_run.lines():
                    report.training = DryRunLine.model_validate_json(value)

            await run_together(feed(), drain())
    report.compare([batch.digest for batch in journal_of_lineage.batches])
    return report


async def run(request: Request, tick: Tick) -> Report:
    """Copy the selected experiences to the replay's topic, and train a new lineage on them.

    Raises:
        UsageError: a replay with this lineage exists, or a setting is invalid.
        HeadraceError: a program failed.
    """
    if await asyncio.to_thread(CopyState.read, file_path(request, ".json")) is not None:
        raise UsageError(
            f"there was a replay into lineage {request.lineage!r} already; its versions still exist: choose another "
            f"name, or resume it with `headrace replay resume {request.lineage}`"
        )
    report = _report(request)
    journal_of_lineage = await _journal(request)
    async with open_merge(request.bus, request.topic_range) as merge:
        choose_cut(request, report, journal_of_lineage, merge)
        await copying.create(request.bus, request.lineage, int(request.overrides.get("bus.replication") or 1))
        try:
            await copy(request, report, merge, journal_of_lineage, tick)
        except BaseException:
            await copying.remove(request.bus, request.lineage)
            raise
    return await _train(request, report, journal_of_lineage, tick)


async def copy(
    request: Request, report: Report, merge: PartitionMerge, journal_of_lineage: Journal, tick: Tick
) -> None:
    """Write the experiences to the topic that the trainer reads, then the state of the copy to its file."""
    async with producing(request.bus, "headrace-replay") as producer:
        copier = copying.Copier(producer, request.topic)
        await Pipeline(request, report, copier, tick, store=True).run(merge, journal_of_lineage)
        await copier.flush()
    report.topic = request.topic
    written = CopyState(of=request.of, recorded=report.cut == "recorded", experiences=report.experiences)
    await asyncio.to_thread(written.write, file_path(request, ".json"))


async def resume(request: Request, tick: Tick) -> Report:
    """Continue the training of an interrupted replay.

    Raises:
        UsageError: the copy of the replay was not completed from this data directory.
    """
    written = await asyncio.to_thread(CopyState.read, file_path(request, ".json"))
    if written is None:
        raise UsageError(
            f"lineage {request.lineage!r}: this data directory has no complete copy of the replay; "
            "start it with `headrace replay run`"
        )
    request = replace(request, of=written.of)
    report = _report(request)
    report.topic, report.experiences = request.topic, written.experiences
    report.cut, report.cut_because = ("recorded" if written.recorded else "rules"), "as in the interrupted run"
    return await _train(request, report, await _journal(request), tick)


async def _train(request: Request, report: Report, journal_of_lineage: Journal, tick: Tick) -> Report:
    total = report.experiences

    def progress(reports: program.TrainingReports) -> None:
        tick("training", reports.decided, total)

    log = file_path(request, ".log")
    reports = await program.train(request, report.cut == "recorded", log, progress)
    async with connected(request.bus) as topics:
        versions = await program.checkpoints(topics, request.prefix)
    if not versions:
        raise HeadraceError(f"the trainer ended without publishing a version; its log is {log}")
    report.training = reports.result(total, len(versions) - 1)
    report.version = versions[-1].version
    report.compare([batch.digest for batch in journal_of_lineage.batches])
    return report


async def _feed(program: Program, item: Item) -> None:
    for cut in item.cuts:
        await program.feed("batch", str(cut).encode())
    await program.feed("experience", item.event_json)


async def _journal(request: Request) -> Journal:
    async with connected(request.bus) as topics:
        return await partition_merge.read(topics, request.model, request.of)


def _report(request: Request) -> Report:
    return Report(request.lineage, request.of, request.topic_range.topic)


def file_path(request: Request, suffix: str) -> Path:
    """Return the path of the replay's file with the ending `suffix`, in `replays` of the data directory."""
    return Path(str(request.overrides.get("data_dir"))) / "replays" / f"{request.lineage}{suffix}"
