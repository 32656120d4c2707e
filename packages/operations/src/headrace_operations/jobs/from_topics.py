"""Jobs whose source is a range of a topic: a replay with another algorithm, which goes on by itself where it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import get_args

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.jobs.job import Job
from headrace_operations.replay import copying, runner
from headrace_operations.replay.offering import offer
from headrace_operations.replay.report import Report
from headrace_operations.replay.request import Request, Source, make
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_operations.supervisor.state import read

PREFIX = "topic:"
"""Before the name of a topic, where a file could be named."""
Tick = Callable[[str, int, int], None]


async def train(request: Request, tick: Tick) -> Report:
    """Copy the range and train it, or go on with what an earlier process has copied."""
    written = runner.Written.read(runner.place_of(request, ".json"))
    if written is not None:
        return await runner.resume(request, tick)
    if request.lineage in await copying.lineages(request.bus):  # it was killed while it copied, and nothing was trained
        await copying.remove(request.bus, request.lineage)
    return await runner.run(request, tick)


def request_of(kind: str, wanted: Range, job: Job) -> Request:
    """A replay of the range with the job's algorithm and settings. Raises `UsageError`."""
    if job.lineage is None:
        raise UsageError(f"headrace train {kind} {PREFIX}{wanted.topic}: name the new lineage with --lineage")
    settings = {"trainer.advantage.kind": "", "trainer.loss.kind": "", **job.settings, "trainer.algorithm": kind}
    overrides = Overrides(job.config, settings, os.environ)
    if job.base is not None:
        overrides.set("trainer.base", str(job.base))
    if job.data_dir is not None:
        overrides.set("data_dir", job.data_dir.absolute())
    bus = job.bus or str(overrides.get("bus.address") or "") or read(data_dir_of(job.data_dir, overrides)).bus
    return make(job.lineage, wanted, overrides, bus, cut="rules")


async def offer_last(request: Request) -> None:
    """Tell the registry of the last version."""
    await offer(request.bus, request.lineage)


def topic_of(sources: list[str]) -> str | None:
    """The topic that is meant, None when the sources are files. Raises `UsageError` for both at once."""
    topics = [source.removeprefix(PREFIX) for source in sources if source.startswith(PREFIX)]
    if not topics:
        return None
    if topics[0] not in get_args(Source):
        raise UsageError(f"{PREFIX}{topics[0]}: what can be trained is on {' and '.join(get_args(Source))}")
    if len(sources) > 1:
        raise UsageError(
            f"{PREFIX}{topics[0]} is the only source of a job that has it; train files in a job of their own"
        )
    return topics[0]
