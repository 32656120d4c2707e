"""Training in several stages from one TOML file; each stage starts with the result of the stage before it. For example:

    lineage = "support"
    base = "models/base"

    [settings.trainer.lora]
    rank = 16

    [[stages]]
    algorithm = "sft"
    sources = ["written.jsonl"]
    epochs = 2

    [[stages]]
    algorithm = "grpo"
    play = ["{python}", "agent.py"]
    steps = 30

A stage with `sources` is a job on files. A stage with `play` starts its own services and a program that plays tasks
against them until the given number of steps is taken. The lineages are called `support-1`, `support-2`. Paths are
relative to the folder of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace.topics import connected
from headrace_operations.catalog import export, fetch_manifest, merge_adapter
from headrace_operations.jobs import runner
from headrace_operations.jobs.job import Job, JobJournal, PreparedJob, RowOptions, lock_job, prepare
from headrace_operations.jobs.runner import JobResult
from headrace_operations.replay import program
from headrace_operations.supervisor import Supervisor
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import VariableName, program_environment
from headrace_runtime.settings.table import read_toml
from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.programs import MANIFEST_FILE

Tick = Callable[[str, int, int], None]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainingStage(_Strict):
    """One stage of a training recipe.

    A stage either trains on data sets (`sources`), or runs a program (`play`) and trains on its model calls meanwhile.
    """

    algorithm: str
    sources: tuple[str, ...] = ()
    play: tuple[str, ...] = ()
    """Command of the program.

    `{python}`, `{base_url}`, `{url}` and `{model}` are replaced; `OPENAI_BASE_URL` is set.
    """
    environment: tuple[VariableName, ...] = ()
    """Environment variables that the program gets in addition to those of the system."""
    steps: int = Field(default=20, ge=1)
    """Training steps after which a stage with a program ends."""
    epochs: int = Field(default=1, ge=1)
    shuffle: bool = True
    seed: int = 0
    columns: dict[str, str] = {}
    format: str | None = None
    split: str | None = None
    ignore: tuple[str, ...] = ()
    keep_duplicates: bool = False
    skip_bad: int = Field(default=0, ge=0)
    held_out: tuple[str, ...] = ()
    settings: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if bool(self.sources) == bool(self.play):
            raise ValueError("a stage has either sources or play")
        return self


class StagedTraining(_Strict):
    """All stages of a recipe. Paths are relative to `folder`."""

    lineage: str
    base: str | None = None
    settings: dict[str, Any] = {}
    stages: tuple[TrainingStage, ...] = Field(min_length=1, max_length=16)
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class StageEnvironment:
    """Settings file, bus address and data directory, which all stages share."""

    config: Path | None = None
    bus: str | None = None
    data_dir: Path | None = None


def read(path: Path) -> StagedTraining:
    """Read a recipe.

    Raises:
        UsageError: the file is not a valid recipe.
    """
    try:
        table = read_toml(path)
        return StagedTraining.model_validate({**table, "folder": path.parent.absolute()})
    except OSError as error:
        raise UsageError(f"recipe {path}: cannot be read: {error.strerror}; name an existing file") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc'])) or 'recipe'}: {first['msg']}") from None
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None


def run(recipe: StagedTraining, environment: StageEnvironment, tick: Tick, offer: bool = False) -> list[JobResult]:
    """Run all unfinished stages in order. Raises the errors of `jobs.run`."""
    return asyncio.run(_run(recipe, environment, tick, offer))


async def _run(recipe: StagedTraining, environment: StageEnvironment, tick: Tick, offer: bool) -> list[JobResult]:
    base = recipe.folder / recipe.base if recipe.base else None
    results: list[JobResult] = []
    for number, stage in enumerate(recipe.stages, 1):
        last = number == len(recipe.stages)

        def stage_tick(activity: str, completed: int, total: int, number: int = number) -> None:
            tick(f"stage {number}: {activity}", completed, total)

        prepared = prepare(_job(recipe, stage, number, base, environment, offer=offer and last))
        run_stage = (
            train_stage(prepared, stage.play, stage.steps, stage_tick, stage.environment)
            if stage.play
            else runner.train(prepared, stage_tick)
        )
        result = await run_stage
        results.append(result)
        if not last:
            base = await _export_version(prepared, result.journal)
    return results


def _job(
    recipe: StagedTraining,
    stage: TrainingStage,
    number: int,
    base: Path | None,
    environment: StageEnvironment,
    *,
    offer: bool,
) -> Job:
    """Build the job of a stage. Settings of the stage override those of the recipe, and these override the settings
    file.
    """
    options = RowOptions(
        columns=stage.columns,
        form=stage.format,
        split=stage.split,
        ignored=frozenset(stage.ignore),
        keep_duplicates=stage.keep_duplicates,
        skip_bad=stage.skip_bad,
        held_out=tuple(recipe.folder / path for path in stage.held_out),
    )
    return Job(
        kind=stage.algorithm,
        source=[recipe.folder / source for source in stage.sources],
        base=base,
        lineage=f"{recipe.lineage}-{number}",
        settings={**flatten_settings(recipe.settings), **flatten_settings(stage.settings)},
        epochs=stage.epochs,
        shuffle=stage.shuffle,
        seed=stage.seed,
        rows=options,
        config=environment.config,
        bus=environment.bus,
        data_dir=environment.data_dir,
        offer=offer,
    )


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return the values in nested tables by the dotted names of the settings."""
    settings: dict[str, object] = {}
    for name, value in table.items():
        settings |= (
            flatten_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return settings


async def _export_version(prepared: PreparedJob, journal: JobJournal) -> Path:
    """Export the stage's last version as the base of the next stage; an adapter is merged into its base."""
    folder = prepared.file_path(".version")
    if folder.exists():
        return folder
    assert journal.manifest is not None
    draft = folder.with_name(f".{folder.name}.draft")
    await asyncio.to_thread(_remove_folder, draft)
    manifest = await asyncio.to_thread(fetch_manifest, journal.manifest)
    if manifest.kind == "lora":
        assert journal.base_manifest is not None
        await merge_adapter(journal.manifest, journal.base_manifest, draft.absolute(), prepared.overrides.environ)
    else:
        await asyncio.to_thread(export, manifest, draft)
    (draft / MANIFEST_FILE).unlink(missing_ok=True)  # versions of the next stage have their own manifest
    draft.rename(folder)
    return folder


def _remove_folder(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


_POLL_S = 0.5
_READY_S_MAX = 600.0


async def train_stage(
    prepared: PreparedJob, command: Sequence[str], steps: int, tick: Tick, variables: Sequence[str] = ()
) -> JobResult:
    """Train a stage with the traffic of a program and return its last version. An interrupted stage resumes.

    Args:
        prepared: the job of the stage.
        command: the program, with placeholders.
        steps: training steps after which the stage ends.
        tick: reports the progress.
        variables: names of environment variables that the program gets.

    Raises:
        StartFailed: the services did not start.
        HeadraceError: the program ended before the steps were taken.
    """
    with lock_job(prepared):
        path = prepared.file_path(".json")
        journal = JobJournal.begin(prepared, datetime.now(UTC))
        if journal.version is None:
            tick("starting the services", 0, 0)
            async with _services(prepared) as supervisor:
                reports = await _run_program(prepared, supervisor, command, steps, tick, variables)
                first, last = await _first_and_last_version(supervisor.plan.bus, prepared.lineage)
            result = reports.result(reports.decided, 0)
            journal = journal.record(
                path,
                base=first.version,
                base_manifest=first.manifest,
                version=last.version,
                manifest=last.manifest,
                trained=result.trained,
                dropped={str(reason): count for reason, count in result.dropped.items()},
                batches=tuple(batch.digest for batch in result.batches),
            )
        return JobResult(prepared.lineage, journal, None)


@contextlib.asynccontextmanager
async def _services(prepared: PreparedJob) -> AsyncIterator[Supervisor]:
    """Start the services of `headrace up` in the stage's own data directory. All stages share one blob store."""
    overrides = prepared.overrides
    blobs = overrides.get("blobs.url") or (prepared.data_dir / "blobs").as_uri()
    stage_settings: dict[
        str, object
    ] = {  # the settings file configures the algorithm of the live lineage, not this one
        "trainer.advantage.kind": "",
        "trainer.loss.kind": "",
    }
    stage_settings |= {**prepared.job.settings, "blobs.url": blobs, "trainer.lineage": prepared.lineage}
    stage_settings |= {"trainer.base": prepared.base, "trainer.algorithm": prepared.job.kind}
    supervisor = await asyncio.to_thread(
        Supervisor,
        prepared.file_path(".services"),
        config=prepared.job.config,
        settings=stage_settings,
        auto_ports=True,
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_ready, _READY_S_MAX)
        yield supervisor
    finally:
        await asyncio.to_thread(supervisor.stop)


async def _run_program(
    prepared: PreparedJob,
    supervisor: Supervisor,
    command: Sequence[str],
    steps: int,
    tick: Tick,
    variables: Sequence[str],
) -> program.TrainingReports:
    values = {
        "python": sys.executable,
        "base_url": supervisor.base_url,
        "url": supervisor.url("gateway"),
        "model": prepared.model,
    }
    arguments = [_fill_placeholders(part, values) for part in command]
    extra_variables = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_KEY": "none"}
    environ = program_environment(variables, more=extra_variables, environ=prepared.overrides.environ)
    reports = program.TrainingReports()
    process = await asyncio.create_subprocess_exec(*parent_bound_command(arguments), env=environ, stdout=sys.stderr)
    try:
        async with connected(supervisor.plan.bus) as topics:
            while _steps_taken(reports) < steps:
                with contextlib.suppress(Unreachable):
                    await program.follow(topics, TrainingMetrics.topic, reports)
                tick("playing and training", min(_steps_taken(reports), steps), steps)
                if process.returncode is not None and _steps_taken(reports) < steps:
                    raise HeadraceError(
                        f"{arguments[0]} ended with status {process.returncode} after {_steps_taken(reports)} of "
                        f"{steps} steps; run the same command again to resume"
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _POLL_S)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return reports


def _steps_taken(reports: program.TrainingReports) -> int:
    return max((batch.step for batch in reports.batches), default=0)


async def _first_and_last_version(bus: str, lineage: str) -> tuple[Checkpoint, Checkpoint]:
    """Read the versions that a training job published for its lineage, and return the first and the last one.

    Raises:
        HeadraceError: the lineage has only its base version, because the job took too few steps.
    """
    async with connected(bus) as topics:
        checkpoints = [
            checkpoint for checkpoint in await program.checkpoints(topics, "") if checkpoint.lineage == lineage
        ]
    if len(checkpoints) < 2:
        raise HeadraceError(
            f"lineage {lineage}: has no version but its base; steps must be at least trainer.steps_per_version"
        )
    return checkpoints[0], checkpoints[-1]


def _fill_placeholders(argument: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument
