"""Jobs that train on a range of a topic: a replay with another algorithm, which resumes after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import get_args

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.jobs.job import Job
from headrace_operations.replay import copying, runner
from headrace_operations.replay.program import offer_version
from headrace_operations.replay.request import Report, Request, Source, make
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_operations.supervisor.state import read

PREFIX = "topic:"
"""Prefix that distinguishes the name of a topic from that of a file."""
Tick = Callable[[str, int, int], None]


async def train(request: Request, tick: Tick) -> Report:
    """Copy the range of the topic and train on the copy, or continue with the copy of an interrupted process."""
    written = runner.CopyState.read(runner.file_path(request, ".json"))
    if written is not None:
        return await runner.resume(request, tick)
    if request.lineage in await copying.lineages(request.bus):  # an earlier process was killed during the copy
        await copying.remove(request.bus, request.lineage)
    return await runner.run(request, tick)


def replay_request(kind: str, topic_range: Range, job: Job) -> Request:
    """Build a replay request for the range with the job's algorithm and settings.

    Raises:
        UsageError: the lineage is missing or a setting is invalid.
    """
    if job.lineage is None:
        raise UsageError(f"headrace train {kind} {PREFIX}{topic_range.topic}: name the new lineage with --lineage")
    settings = {"trainer.advantage.kind": "", "trainer.loss.kind": "", **job.settings, "trainer.algorithm": kind}
    overrides = Overrides(job.config, settings, os.environ)
    if job.base is not None:
        overrides.set("trainer.base", str(job.base))
    if job.data_dir is not None:
        overrides.set("data_dir", job.data_dir.absolute())
    bus = job.bus or str(overrides.get("bus.address") or "") or read(data_dir_of(job.data_dir, overrides)).bus
    return make(job.lineage, topic_range, overrides, bus, cut="rules")


async def offer_last_version(request: Request) -> None:
    """Publish the last version that a training job produced, so that the registry considers it as a candidate."""
    await offer_version(request.bus, request.lineage)


def source_topic(sources: list[str]) -> str | None:
    """Return the topic that `sources` names, or None if all sources are files.

    Raises:
        UsageError: the topic cannot be trained on, or there are other sources as well.
    """
    topics = [source.removeprefix(PREFIX) for source in sources if source.startswith(PREFIX)]
    if not topics:
        return None
    if topics[0] not in get_args(Source):
        raise UsageError(f"{PREFIX}{topics[0]}: topics that can be trained on are {' and '.join(get_args(Source))}")
    if len(sources) > 1:
        raise UsageError(f"{PREFIX}{topics[0]}: must be the only source; train on files in another job")
    return topics[0]
