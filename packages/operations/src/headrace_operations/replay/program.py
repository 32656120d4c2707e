"""Runs programs of services over pipes, and the trainer of a replay or a job, and raises their failures with the
reason.

The trainer's reports are followed on the bus, and its version is offered to the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from headrace.errors import HeadraceError, UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, Topics, connected, event_of, fetch
from headrace_operations.replay.request import Request
from headrace_operations.supervisor.plan import installed
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import line_of, parse_line
from headrace_schemas import BatchRecord, Checkpoint, Event, TrainingMetrics
from headrace_schemas.programs import DryRunBatch, DryRunLine, topic_prefix
from headrace_schemas.values.blobs import Manifest

_LINE_BYTES_MAX = 256 * 1024 * 1024
_BUFFER_BYTES = 1 << 20
_LOG_TAIL_BYTES = 65_536
_STOP_S = 60.0
"""Seconds that a trainer gets to stop before it is killed."""
_USAGE = 2
"""Exit status of a service with invalid settings."""


class Program:
    """Child process that runs a program of a service on lines of standard input. `start_program` starts it.

    Use `feed` and `lines` from two tasks: the program stops reading while its output is not read.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._log = log

    async def feed(self, command: str, value: bytes) -> None:
        """Send one line: the word `command`, then JSON.

        It waits while the program is busy, and raises the program's failure.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(line_of(command, value))
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            await self.wait_ended()
            raise

    def close(self) -> None:
        """Close the program's input; no line may be sent afterwards."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def lines(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the word and the JSON of each output line until the program ends. Raises the program's failure."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield parse_line(line)
        await self.wait_ended()

    async def wait_ended(self) -> None:
        """Wait for the end of the program.

        Raises:
            UsageError: the settings of the program are invalid.
            HeadraceError: the program failed otherwise.
        """
        status = await self._process.wait()
        if status:
            reason = failure_reason(_last_lines(self._log), self._name)
            raise (UsageError if status == _USAGE else HeadraceError)(reason or f"{self._name}: exit status {status}")


def _last_lines(log: IO[bytes]) -> list[str]:
    """Return the last lines of a log, which may be of any length."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
    return log.read().decode("utf-8", "replace").splitlines()


def failure_reason(lines: Sequence[str], name: str) -> str:
    """Return the last message of a service before it ended, without the formatting of its log."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        fields = json.loads(last)
    except (ValueError, RecursionError):
        return last.removeprefix("headrace ")
    return f"{name}: {fields.get('error') or fields.get('event')}" if isinstance(fields, dict) else last


def service_module(service: str) -> str:
    """Return the name of a service's package, such as `headrace_scorer`.

    Raises:
        UsageError: the service is not installed.
    """
    info = installed().get(service)
    if info is None:
        raise UsageError(f"the {service} service is not installed; install it with pip install headrace-{service}")
    return info.module


@asynccontextmanager
async def start_program(service: str, environ: Mapping[str, str], filter_: str = "replay") -> AsyncIterator[Program]:
    """Start `python -m headrace_<service>.<filter_>`; it is killed if the block is left before it has ended."""
    with tempfile.TemporaryFile() as log:
        command = parent_bound_command([sys.executable, "-m", f"{service_module(service)}.{filter_}"])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=log, env=dict(environ), limit=_LINE_BYTES_MAX
        )
        assert process.stdin is not None
        process.stdin.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        try:
            yield Program(service, process, log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


_POLL_INTERVAL_S = 0.5


@dataclass(slots=True)
class TrainingReports:
    """Training reports of one trainer, added up: its batches, and the number of outcomes by kind."""

    offset: int = 0
    seen: set[str] = field(default_factory=set)
    batches: list[BatchRecord] = field(default_factory=list)
    verdict_counts: Counter[str | None] = field(default_factory=Counter)

    def add(self, account: TrainingMetrics) -> None:
        """Add a training report; a report that was added before is ignored."""
        if account.event_id not in self.seen:
            self.seen.add(account.event_id)
            self.batches += account.batches
            self.verdict_counts.update(verdict.dropped for verdict in account.verdicts)

    @property
    def decided(self) -> int:
        return sum(self.verdict_counts.values())

    def result(self, experiences: int, versions: int) -> DryRunLine:
        """Return a summary of the reports about `experiences` experiences; those without an outcome count as
        waiting.
        """
        dropped = {
            str(reason): count for reason, count in sorted(self.verdict_counts.items(), key=str) if reason is not None
        }
        return DryRunLine.model_validate(
            {
                "trained": self.verdict_counts[None],
                "dropped": dropped,
                "waiting": max(0, experiences - self.decided),
                "batches": [DryRunBatch(experiences=batch.experiences, digest=batch.digest) for batch in self.batches],
                "versions": versions,
            }
        )


async def follow(topics: Topics, topic: str, reports: TrainingReports) -> None:
    """Read the training reports that were published on `topic` since the last call, and add them to `reports`."""
    async for record in topics.records(Range(topic, from_offset=reports.offset)):
        reports.offset = record.offset + 1
        with contextlib.suppress(HeadraceError):  # another producer may write an invalid record
            event = await event_of(TrainingMetrics.topic, record.value, record.headers)
            if isinstance(event, TrainingMetrics):
                reports.add(event)


async def checkpoints(topics: Topics, prefix: str) -> list[Checkpoint]:
    """Return the versions of a lineage, the base first."""
    events: dict[str, Event] = {}
    async for record in topics.records(Range(f"{prefix}{Checkpoint.topic}")):
        with contextlib.suppress(HeadraceError):
            event = await event_of(Checkpoint.topic, record.value, record.headers)
            events[event.event_id] = event
    return [event for event in events.values() if isinstance(event, Checkpoint)]


async def train(
    request: Request, recorded: bool, log: Path, progress: Callable[[TrainingReports], None]
) -> TrainingReports:
    """Train on all experiences of the copied topics, and return the trainer's reports. Raises the errors of
    `run_trainer`.
    """
    job = {
        "topic": request.topic,
        "replays": request.of,
        "cut": "recorded" if recorded else "rules",
        "until_end": True,
        "announce_to": request.prefix,
    }
    environ = request.environ(lineage=request.lineage, port=0, job=job)
    return await run_trainer(environ, request.bus, request.prefix, log, progress)


async def run_trainer(
    environ: Mapping[str, str], bus: str, prefix: str, log: Path, progress: Callable[[TrainingReports], None]
) -> TrainingReports:
    """Run a trainer to its end and follow its reports on the topics with `prefix`.

    Raises:
        UsageError: the trainer refused a setting.
        HeadraceError: the trainer failed.
    """
    reports = TrainingReports()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        command = parent_bound_command([sys.executable, "-m", service_module("trainer")])
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=dict(environ))
    ended = asyncio.create_task(process.wait())
    try:
        async with connected(bus) as topics:
            while not ended.done():
                await asyncio.wait([ended], timeout=_POLL_INTERVAL_S)
                await follow(topics, f"{prefix}{TrainingMetrics.topic}", reports)
                progress(reports)
            await follow(topics, f"{prefix}{TrainingMetrics.topic}", reports)
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait([ended], timeout=_STOP_S)
            if process.returncode is None:
                process.kill()
            await ended
    if process.returncode:
        with log.open("rb") as output:
            lines = _last_lines(output)
        kind = UsageError if process.returncode == _USAGE else HeadraceError
        raise kind(f"{failure_reason(lines, 'trainer')} (the log of the trainer is {log})")
    return reports


async def offer_version(bus: str, lineage: str, version: str | None = None) -> Checkpoint:
    """Announce a version (by default the last one) on `checkpoints`, after the base that an adapter needs.

    Raises:
        UsageError: the replay has no such version.
    """
    async with connected(bus) as topics:
        versions = await checkpoints(topics, topic_prefix(lineage))
    if not versions:
        raise UsageError(f"lineage {lineage!r}: the replay has no version yet")
    chosen = next((entry for entry in versions if entry.version == version), None) if version else versions[-1]
    if chosen is None:
        raise UsageError(
            f"lineage {lineage!r}: has no version {version}; it has {', '.join(entry.version for entry in versions)}"
        )
    manifest = Manifest.model_validate_json(await asyncio.to_thread(fetch, chosen.manifest))
    bases = [entry for entry in versions if entry.version == manifest.base]
    async with producing(bus, "headrace-replay") as producer:
        for checkpoint in (*bases, chosen):
            await producer.send([Outgoing.of(checkpoint, "headrace/replay")])
    return chosen
