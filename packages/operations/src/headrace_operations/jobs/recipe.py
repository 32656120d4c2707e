"""Several stages in one TOML file: each begins with what the one before it has made. SFT first, then RL, for example.

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

A stage with `sources` is a job. One with `play` starts services of its own and a program that plays tasks against them,
until so many steps were taken. The lineages are called `support-1`, `support-2`. Paths are from the recipe's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.errors import UsageError
from headrace_operations.catalog.exporting import export, manifest_of
from headrace_operations.catalog.importing import merged
from headrace_operations.jobs import playing, runner
from headrace_operations.jobs.job import Job, PreparedJob, RowOptions, prepare
from headrace_operations.jobs.journal import JobJournal
from headrace_operations.jobs.runner import JobResult
from headrace_runtime.program_environment import VariableName
from headrace_runtime.settings_table import parse_toml
from headrace_schemas.importing import MANIFEST_FILE

Tick = Callable[[str, int, int], None]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainingStage(_Strict):
    """One stage: a job on `sources`, or traffic that a program makes."""

    algorithm: str
    sources: tuple[str, ...] = ()
    play: tuple[str, ...] = ()
    """A command. `{python}`, `{base_url}`, `{url}` and `{model}` are filled in. `OPENAI_BASE_URL` is set."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables that the command gets besides the system's own."""
    steps: int = Field(default=20, ge=1)
    """StagePlace a program plays: training steps after which it is stopped."""
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
    def _one_of_two(self) -> Self:
        if bool(self.sources) == bool(self.play):
            raise ValueError("a stage has either sources or play")
        return self


class StagedTraining(_Strict):
    """A recipe. `folder` is where its paths begin."""

    lineage: str
    base: str | None = None
    settings: dict[str, Any] = {}
    stages: tuple[TrainingStage, ...] = Field(min_length=1, max_length=16)
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Settings file, bus and data directory of all stages."""

    config: Path | None = None
    bus: str | None = None
    data_dir: Path | None = None


def read(path: Path) -> StagedTraining:
    """Raises `UsageError` for a file that is no recipe."""
    try:
        table = parse_toml(path.read_bytes())
        return StagedTraining.model_validate({**table, "folder": path.parent.absolute()})
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None


def run(recipe: StagedTraining, where: StagePlace, tick: Tick, offer: bool = False) -> list[JobResult]:
    """All stages, one after the other; those that are done are passed. Raises as `jobs.run` does."""
    return asyncio.run(_run(recipe, where, tick, offer))


async def _run(recipe: StagedTraining, where: StagePlace, tick: Tick, offer: bool) -> list[JobResult]:
    base = recipe.folder / recipe.base if recipe.base else None
    results: list[JobResult] = []
    for number, stage in enumerate(recipe.stages, 1):
        last = number == len(recipe.stages)

        def told(doing: str, done: int, total: int, number: int = number) -> None:
            tick(f"stage {number}: {doing}", done, total)

        prepared = prepare(_job(recipe, stage, number, base, where, offer=offer and last))
        run_stage = (
            playing.play(prepared, stage.play, stage.steps, told, stage.environment)
            if stage.play
            else runner.train(prepared, told)
        )
        result = await run_stage
        results.append(result)
        if not last:
            base = await _folder_of(prepared, result.journal)
    return results


def _job(
    recipe: StagedTraining, stage: TrainingStage, number: int, base: Path | None, where: StagePlace, *, offer: bool
) -> Job:
    """Settings of the stage win over those of the recipe, which win over those of the file."""
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
        settings={**flat(recipe.settings), **flat(stage.settings)},
        epochs=stage.epochs,
        shuffle=stage.shuffle,
        seed=stage.seed,
        rows=options,
        config=where.config,
        bus=where.bus,
        data_dir=where.data_dir,
        offer=offer,
    )


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested tables as settings by their dotted names."""
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


async def _folder_of(prepared: PreparedJob, journal: JobJournal) -> Path:
    """The stage's last version as a folder, an adapter merged into its base: what the next stage begins with."""
    folder = prepared.place(".version")
    if folder.exists():
        return folder
    assert journal.manifest is not None
    draft = folder.with_name(f".{folder.name}.draft")
    await asyncio.to_thread(_cleared, draft)
    manifest = await asyncio.to_thread(manifest_of, journal.manifest)
    if manifest.kind == "lora":
        assert journal.base_manifest is not None
        await merged(journal.manifest, journal.base_manifest, draft.absolute(), prepared.overrides.environ)
    else:
        await asyncio.to_thread(export, manifest, draft)
    (draft / MANIFEST_FILE).unlink(missing_ok=True)  # the next stage's versions have manifests of their own
    draft.rename(folder)
    return folder


def _cleared(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
