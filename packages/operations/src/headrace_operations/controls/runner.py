"""Trains each control on the recording, has the gate's program play what came of it, and compares.

Nothing live is touched: blobs, bus and services are those of a scratch folder.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError, UsageError
from headrace_operations.controls.kinds import Control
from headrace_operations.controls.report import Report, Run
from headrace_operations.controls.serving import Stage, serving
from headrace_operations.controls.statistics import Score
from headrace_operations.replay.pipeline import side_by_side
from headrace_operations.replay.program import started
from headrace_operations.supervisor.overrides import Overrides
from headrace_schemas import Checkpoint, Experience
from headrace_schemas.controls import Measure, Measured, ShortRun

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Request:
    """`settings` are those of the command line; the file `config` has the others."""

    experiences: Sequence[Experience]
    controls: Sequence[Control]
    seeds: int
    plays: int
    scratch: Path
    config: Path | None
    settings: Mapping[str, object]
    environ: Mapping[str, str]

    @property
    def own(self) -> Mapping[str, object]:
        """The settings by name; everything that is written lies in the scratch folder."""
        return {**self.settings, "data_dir": self.scratch, "blobs.url": (self.scratch / "blobs").as_uri()}

    def overrides(self, more: Mapping[str, object] | None = None) -> Overrides:
        """What a program that takes part finds in its environment."""
        return Overrides(self.config, {**self.own, **(more or {})}, self.environ)


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a control with a seed."""

    control: Control
    seed: int
    run: ShortRun


def check(request: Request) -> None:
    """What can be known before anything starts. Raises `UsageError` with the remedy."""
    overrides = request.overrides()
    wants = {
        "trainer.base": "name the settings file that the trainer runs with (--config FILE)",
        "registry.gate.command": "the gate's program scores the controls; see docs/gate.md",
    }
    for name, remedy in wants.items():
        if not overrides.get(name):
            raise UsageError(f"{name} is not set: {remedy}")
    if not request.experiences:
        raise UsageError(
            f"there is no experience with a reward of model {overrides.get('trainer.model') or 'headrace'}: "
            "name another range, or the model with --set trainer.model=NAME"
        )


async def run(request: Request, tick: Tick) -> Report:
    """Raises `UsageError` for settings that a program refuses, `HeadraceError` for what fails."""
    check(request)
    total = len(request.controls) * request.seeds
    trained: list[Trained] = []
    for seed in range(request.seeds):
        for control in request.controls:
            tick(f"training: {control.name}", len(trained), total)
            trained.append(Trained(control, seed, await _train(request, control, seed)))
    base = trained[0].run.base
    async with serving(request.scratch, request.config, request.own, request.environ) as stage:
        tick("playing: the base", 0, total + 1)
        before = await _measure(request, stage, base, base)
        runs = []
        for number, one in enumerate(trained, 1):
            tick(f"playing: {one.control.name}", number, total + 1)
            scores = await _measure(request, stage, one.run.base, one.run.last)
            runs.append(Run(one.control, one.seed, one.run, scores))
    return Report(len(request.experiences), before, runs)


async def _train(request: Request, control: Control, seed: int) -> ShortRun:
    """A process of its own: the same recording, in another order for each seed but the first."""
    experiences = list(request.experiences)
    if seed:
        random.Random(f"order {seed}").shuffle(experiences)
    changed = control.change(experiences, random.Random(f"{control.name} {seed}"))
    if not changed:
        raise UsageError(f"{control.name}: nothing is left to train")
    name = re.sub(r"[^a-z0-9]+", "-", control.name.lower()).strip("-")
    more = {"trainer.lineage": f"control-{name}-{seed}", "trainer.seed": seed, **control.settings}
    lines = [("experience", one.to_json()) for one in changed]
    found = await _answers("trainer", "short_training", request.overrides(more), lines)
    if not found:
        raise HeadraceError(f"{control.name}: the trainer ended without a version")
    return ShortRun.model_validate_json(found[0])


async def _measure(request: Request, stage: Stage, base: Checkpoint, one: Checkpoint) -> Sequence[Score]:
    """The gate's program plays audit tasks with it."""
    await stage.show(base, one)
    overrides = request.overrides({"registry.gate.base_url": stage.base_url})
    wanted = Measure(version=one.version, plays=request.plays)
    found = await _answers("registry", "audits", overrides, [("measure", wanted.model_dump_json().encode())])
    if not found:
        raise HeadraceError(f"{one.version} was not measured")
    return Measured.model_validate_json(found[0]).scores


async def _answers(service: str, filter_: str, overrides: Overrides, lines: Iterable[tuple[str, bytes]]) -> list[bytes]:
    """Everything that a filter of a service writes when it reads these lines."""
    found: list[bytes] = []
    async with started(service, overrides.environ, filter_) as program:

        async def feed() -> None:
            for kind, value in lines:
                await program.feed(kind, value)
            program.close()

        async def drain() -> None:
            found.extend([value async for _, value in program.lines()])

        await side_by_side(feed(), drain())
    return found
