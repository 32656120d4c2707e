"""Plans, runs and resumes replays, and compares the result."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from headrace.errors import HeadraceError, UsageError
from headrace.producing import producing
from headrace.topics import connected
from headrace_operations.replay import copying, journal, training
from headrace_operations.replay.journal import Journal
from headrace_operations.replay.partition_merge import PartitionMerge, opened
from headrace_operations.replay.pipeline import Item, Pipeline, Tick, decide, side_by_side
from headrace_operations.replay.program import Program, started
from headrace_operations.replay.report import Report
from headrace_operations.replay.request import Request
from headrace_runtime import whole_file
from headrace_schemas.replay import DryRunLine


class Written(BaseModel):
    """`replays/<lineage>.json` in the data directory: a replay whose topic is complete, so that it can be resumed."""

    of: str
    recorded: bool
    experiences: int

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole_file.replace(path, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return cls.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None


async def plan(request: Request, tick: Tick) -> Report:
    """What `run` would do. Nothing is written anywhere, but reward functions and the judge are really called."""
    report = _report(request)
    told = await _journal(request)
    async with opened(request.bus, request.wanted) as merge:
        decide(request, report, told, merge)
        environ = request.environ(replays=request.of, lineage=request.lineage, cut=report.cut)
        async with started("trainer", environ) as dry_run:

            async def feed() -> None:
                for batch in told.recorded if report.cut == "recorded" else ():
                    await dry_run.feed("recorded", batch.model_dump_json().encode())
                await Pipeline(request, report, lambda item: _feed(dry_run, item), tick).run(merge, told)
                dry_run.close()

            async def drain() -> None:
                async for _, value in dry_run.lines():
                    report.training = DryRunLine.model_validate_json(value)

            await side_by_side(feed(), drain())
    report.compare([batch.digest for batch in told.batches])
    return report


async def run(request: Request, tick: Tick) -> Report:
    """Copy, then train. Raises `UsageError` when there is such a replay already, and what the programs fail with."""
    if await asyncio.to_thread(Written.read, place_of(request, ".json")) is not None:
        raise UsageError(
            f"there was a replay into lineage {request.lineage!r} already; its versions remain: choose another name, "
            f"or go on with `headrace replay resume {request.lineage}`"
        )
    report = _report(request)
    told = await _journal(request)
    async with opened(request.bus, request.wanted) as merge:
        decide(request, report, told, merge)
        await copying.create(request.bus, request.lineage, int(request.overrides.get("bus.replication") or 1))
        try:
            await copy(request, report, merge, told, tick)
        except BaseException:
            await copying.remove(request.bus, request.lineage)
            raise
    return await _train(request, report, told, tick)


async def copy(request: Request, report: Report, merge: PartitionMerge, told: Journal, tick: Tick) -> None:
    """Fill the topic that training reads."""
    async with producing(request.bus, "headrace-replay") as producer:
        copier = copying.Copier(producer, request.topic)
        await Pipeline(request, report, copier, tick, store=True).run(merge, told)
        await copier.flush()
    report.topic = request.topic
    written = Written(of=request.of, recorded=report.cut == "recorded", experiences=report.experiences)
    await asyncio.to_thread(written.write, place_of(request, ".json"))


async def resume(request: Request, tick: Tick) -> Report:
    """Train on where a replay was interrupted. Raises `UsageError` when its copy was never completed here."""
    written = await asyncio.to_thread(Written.read, place_of(request, ".json"))
    if written is None:
        raise UsageError(f"no replay into lineage {request.lineage!r} was copied to its end from here; run it")
    request = replace(request, of=written.of)
    report = _report(request)
    report.topic, report.experiences = request.topic, written.experiences
    report.cut, report.cut_because = ("recorded" if written.recorded else "rules"), "as it was begun"
    return await _train(request, report, await _journal(request), tick)


async def _train(request: Request, report: Report, told: Journal, tick: Tick) -> Report:
    total = report.experiences

    def progress(accounts: training.TrainingReports) -> None:
        tick("training", accounts.decided, total)

    log = place_of(request, ".log")
    accounts = await training.train(request, report.cut == "recorded", log, progress)
    async with connected(request.bus) as topics:
        made = await training.checkpoints(topics, request.prefix)
    if not made:
        raise HeadraceError(f"the trainer ended without a version; its log is {log}")
    report.training = accounts.result(total, len(made) - 1)
    report.version = made[-1].version
    report.compare([batch.digest for batch in told.batches])
    return report


async def _feed(program: Program, item: Item) -> None:
    for cut in item.cuts:
        await program.feed("batch", str(cut).encode())
    await program.feed("experience", item.whole)


async def _journal(request: Request) -> Journal:
    async with connected(request.bus) as topics:
        return await journal.read(topics, request.model, request.of)


def _report(request: Request) -> Report:
    return Report(request.lineage, request.of, request.wanted.topic)


def place_of(request: Request, suffix: str) -> Path:
    """A file of the replay in the data directory."""
    return Path(str(request.overrides.get("data_dir"))) / "replays" / f"{request.lineage}{suffix}"
