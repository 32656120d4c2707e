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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.errors import UsageError
from headrace_operations.catalog import export, fetch_manifest, merge_adapter
from headrace_operations.jobs import playing, runner
from headrace_operations.jobs.job import Job, JobJournal, PreparedJob, RowOptions, prepare
from headrace_operations.jobs.runner import JobResult
from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.table import parse_toml
from headrace_schemas.programs import MANIFEST_FILE

Tick = Callable[[str, int, int], None]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainingStage(_Strict):
    """One stage: a job on `sources`, or online training on the traffic of a program."""

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
    """Settings file, bus and data directory of all stages."""

    config: Path | None = None
    bus: str | None = None
    data_dir: Path | None = None


def read(path: Path) -> StagedTraining:
    """Read a recipe.

    Raises:
        UsageError: the file is not a valid recipe.
    """
    try:
        table = parse_toml(path.read_bytes())
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

        def stage_tick(doing: str, completed: int, total: int, number: int = number) -> None:
            tick(f"stage {number}: {doing}", completed, total)

        prepared = prepare(_job(recipe, stage, number, base, environment, offer=offer and last))
        run_stage = (
            playing.train_stage(prepared, stage.play, stage.steps, stage_tick, stage.environment)
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
    """Build the job of a stage. Settings of the stage override those of the recipe, which override the file's."""
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
    """Return nested tables as settings by dotted name."""
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
