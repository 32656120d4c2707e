"""Runs control experiments on recorded experiences: trains each control, serves the versions, and compares their
scores.

No live service is changed: blobs, bus and services are in a scratch folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from headrace.errors import HeadraceError, UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, connected
from headrace_operations.catalog import base_folder
from headrace_operations.controls.kinds import Control
from headrace_operations.controls.report import Report, Run
from headrace_operations.replay.pipeline import run_together
from headrace_operations.replay.program import start_program
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_schemas import Checkpoint, Experience, Replica, Routing, ServedVersion
from headrace_schemas.programs import MeasureRequest, MeasureResult, ShortRun
from headrace_schemas.values.errors import InvalidEvent
from headrace_schemas.values.text import decode_text
from headrace_statistics.intervals import Score

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded experiences on which all controls train, the version that sampled them, and the number left out."""

    experiences: Sequence[Experience]
    version: str
    """Version that sampled all experiences; empty if there are none."""
    later: int
    """Number of experiences that are left out because another version sampled at least a part of them."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request to run control experiments. `settings` override those in the file `config`."""

    recording: Recording
    controls: Sequence[Control]
    seeds: int
    plays: int
    scratch: Path
    config: Path | None
    settings: Mapping[str, object]
    environ: Mapping[str, str]

    @property
    def settings_with_scratch(self) -> Mapping[str, object]:
        """Settings by name, with all written data in the scratch folder."""
        return {**self.settings, "data_dir": self.scratch, "blobs.url": (self.scratch / "blobs").as_uri()}

    def overrides(self, additional: Mapping[str, object] | None = None) -> Overrides:
        """Return the settings for a program of the experiment. `additional` settings replace those of the request."""
        return Overrides(self.config, {**self.settings_with_scratch, **(additional or {})}, self.environ)


@dataclass(frozen=True, slots=True)
class TrainedControl:
    """Result of one control experiment (training with manipulated rewards) with one seed."""

    control: Control
    seed: int
    run: ShortRun


def check(request: Request) -> None:
    """Check the settings without starting any program.

    Raises:
        UsageError: a setting is missing; the message names the setting and a remedy.
    """
    overrides = request.overrides()
    required = {
        "trainer.base": "name the settings file of the trainer (--config FILE)",
        "registry.gate.command": "the gate program scores the controls; see docs/gate.md",
    }
    for name, remedy in required.items():
        if not overrides.get(name):
            raise UsageError(f"{name} is not set: {remedy}")
    if not request.recording.experiences:
        raise UsageError(
            f"no experience of model {overrides.get('trainer.model') or 'headrace'} in the range has a reward; "
            "name another range, or another model with --set trainer.model=NAME"
        )


async def run(request: Request, tick: Tick) -> Report:
    """Train all controls and measure their versions.

    Raises:
        UsageError: a program refused its settings.
        HeadraceError: a program failed.
    """
    check(request)
    request = await asyncio.to_thread(_with_base_folder, request)
    total = len(request.controls) * request.seeds
    trained: list[TrainedControl] = []
    for seed in range(request.seeds):
        for control in request.controls:
            tick(f"training: {control.name}", len(trained), total)
            trained.append(TrainedControl(control, seed, await _train(request, control, seed)))
    base = trained[0].run.base
    async with serving(request.scratch, request.config, request.settings_with_scratch, request.environ) as server:
        tick("playing: the base", 0, total + 1)
        base_scores = await _measure(request, server, base, base)
        runs = []
        for number, training in enumerate(trained, 1):
            tick(f"playing: {training.control.name}", number, total + 1)
            scores = await _measure(request, server, training.run.base, training.run.last)
            runs.append(Run(training.control, training.seed, training.run, scores))
    recording = request.recording
    return Report(len(recording.experiences), base_scores, runs, recording.version, recording.later)


def _with_base_folder(request: Request) -> Request:
    """Fetch the base model of the experiment, and return the request with its folder as the setting `trainer.base`.

    The programs of the experiment get a scratch folder as data directory, in which they would not find a base model
    that was downloaded earlier.
    """
    base = base_folder(Overrides(request.config, request.settings, request.environ))
    return replace(request, settings={**request.settings, "trainer.base": str(base)})


async def _train(request: Request, control: Control, seed: int) -> ShortRun:
    """Train one control in a process of its own.

    Each seed after the first one shuffles the order of the experiences.
    """
    experiences = list(request.recording.experiences)
    if seed:
        random.Random(f"order {seed}").shuffle(experiences)
    changed = control.change(experiences, random.Random(f"{control.name} {seed}"))
    if not changed:
        raise UsageError(f"{control.name}: no experience is left to train")
    name = re.sub(r"[^a-z0-9]+", "-", control.name.lower()).strip("-")
    settings = {"trainer.lineage": f"control-{name}-{seed}", "trainer.seed": seed, **control.settings}
    lines = [("experience", experience.to_json()) for experience in changed]
    results = await _run_filter("trainer", "short_training", request.overrides(settings), lines)
    if not results:
        raise HeadraceError(f"{control.name}: the trainer ended without publishing a version")
    return ShortRun.model_validate_json(results[0])


async def _measure(
    request: Request, server: VersionServer, base: Checkpoint, checkpoint: Checkpoint
) -> Sequence[Score]:
    """Serve a trained version, let the gate program play the audit tasks with it, and return the score of each task.

    Audit tasks are held-out tasks that take part in no decision.
    """
    await server.serve(base, checkpoint)
    overrides = request.overrides({"registry.gate.base_url": server.base_url})
    request_line = MeasureRequest(version=checkpoint.version, plays=request.plays)
    results = await _run_filter("registry", "audits", overrides, [("measure", request_line.model_dump_json().encode())])
    if not results:
        raise HeadraceError(f"{checkpoint.version} the registry program returned no scores")
    return MeasureResult.model_validate_json(results[0]).scores


async def _run_filter(
    service: str, filter_: str, overrides: Overrides, lines: Iterable[tuple[str, bytes]]
) -> list[bytes]:
    """Run a program of a service that reads lines from standard input, and return all lines that it writes."""
    results: list[bytes] = []
    async with start_program(service, overrides.environ, filter_) as program:

        async def feed() -> None:
            for kind, value in lines:
                await program.feed(kind, value)
            program.close()

        async def drain() -> None:
            results.extend([value async for _, value in program.lines()])

        await run_together(feed(), drain())
    return results


async def from_bus(bus: str, topic_range: Range) -> list[Experience]:
    """Read the experiences of a range in the order of their times."""
    async with connected(bus) as topics:
        entries = [(entry.time, entry.event) async for entry in topics.read(topic_range)]
    return [event for _, event in sorted(entries, key=lambda entry: entry[0]) if isinstance(event, Experience)]


def from_file(path: Path) -> list[Experience]:
    """Read experiences from a file of JSON lines that `headrace replay events experiences` has written.

    Raises:
        UsageError: a line is invalid; the message names the first such line.
    """
    events = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    events.append(_event(path, number, decode_text(line, number)))
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; write a file with `headrace replay events experiences -o FILE`"
        ) from None
    return [event for event in events if event is not None]


def _event(path: Path, number: int, line: str) -> Experience | None:
    try:
        read = json.loads(line)
        event = read.get("event", None if "problem" in read else read)
        return None if event is None else Experience.from_json(json.dumps(event).encode())
    except (ValueError, AttributeError, InvalidEvent, RecursionError) as error:  # pydantic's error is a ValueError
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path}, line {number}: is not an experience of `headrace replay events`: {reason}") from None


def select_trainable(experiences: Iterable[Experience], model: str, count: int) -> Recording:
    """Select the experiences for the controls: the newest revision of each branch with a reward, of the first version
    only.

    Answers of later versions already reflect training. A model that imitates them improves with any reward, because a
    clipped loss raises rare answers with a positive advantage more than it lowers those with a negative one.

    Args:
        experiences: all experiences of the recording, in the order of their times.
        model: name of the trained model.
        count: maximum number of experiences; the last ones are selected, in order of their first revisions.
    """
    latest: dict[str, Experience] = {}
    for experience in experiences:
        earlier = latest.get(experience.experience_id)
        if experience.model == model and (earlier is None or experience.revision >= earlier.revision):
            branch = experience.branch or (earlier.branch if earlier else None)  # a withdrawal may omit the tokens
            latest[experience.experience_id] = (
                experience if branch is experience.branch else experience.model_copy(update={"branch": branch})
            )
    versions = {
        key: {span.version for span in experience.branch.spans}
        for key, experience in latest.items()
        if experience.reward is not None and experience.branch is not None
    }
    first = next((min(several) for several in versions.values()), "")
    selected = [latest[key] for key, several in versions.items() if several == {first}]
    return Recording(selected[-count:], first, len(versions) - len(selected))


_SERVICES = ("broker", "gateway", "inference")
_LOADED_S_MAX = 600.0
_POLL_S = 0.3


class VersionServer:
    """Gateway and replica that serve one trained version and its base at a time. `serving` creates it.

    Serving one version at a time limits the memory to that of a live swap of versions.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._bus = supervisor.plan.bus
        self._revision = 0
        self.base_url = f"{supervisor.url('gateway')}/v1"

    async def serve(self, base: Checkpoint, checkpoint: Checkpoint) -> None:
        """Serve a version and its base in place of the previous ones, and wait until the replica has loaded the
        version.

        Raises:
            HeadraceError: the replica could not load the version, or not in time.
        """
        self._revision += 1
        served = {
            entry.version: ServedVersion(version=entry.version, manifest=entry.manifest) for entry in (base, checkpoint)
        }
        routing = Routing(
            time=datetime.now(UTC),
            model=checkpoint.model,
            revision=self._revision,
            aliases={"champion": checkpoint.version},
            serve=tuple(served.values()),
        )
        async with producing(self._bus, "headrace-controls") as producer:
            await producer.send([Outgoing.of(routing, "headrace/controls")])
        deadline = time.monotonic() + _LOADED_S_MAX
        while not await self._ready(checkpoint.version):
            if time.monotonic() > deadline:
                raise HeadraceError(f"{checkpoint.version} was not loaded within {_LOADED_S_MAX:g} s")
            await asyncio.sleep(_POLL_S)

    async def _ready(self, version: str) -> bool:
        """Return whether the replica's last heartbeat reports that it has loaded the version."""
        last: Replica | None = None
        async with connected(self._bus) as topics:
            async for entry in topics.read(Range(Replica.topic)):
                last = entry.event if isinstance(entry.event, Replica) else last
        state = next((entry for entry in last.versions if entry.version == version), None) if last else None
        if state is not None and state.state == "failed":
            raise HeadraceError(f"{version} could not be loaded: {state.error}")
        return state is not None and state.state == "ready"


@contextlib.asynccontextmanager
async def serving(
    data_dir: Path, config: Path | None, settings: Mapping[str, object], environ: Mapping[str, str]
) -> AsyncIterator[VersionServer]:
    """Start broker, gateway and replica on free ports, and stop them at the end of the block.

    Args:
        data_dir: the scratch folder of the services.
        config: the settings file, or None.
        settings: settings by dotted name, which override the file.
        environ: environment of the services.
    """
    overrides = {"gateway.port": 0, "inference.port": 0, "broker.port": 0, "broker.kafka_port": 0, "bus.replication": 1}
    supervisor = await asyncio.to_thread(
        Supervisor,
        data_dir,
        config=config,
        settings={**settings, **overrides},
        only=_SERVICES,
        auto_ports=True,
        environ=environ,
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_up)
        yield VersionServer(supervisor)
    finally:
        await asyncio.to_thread(supervisor.stop)
