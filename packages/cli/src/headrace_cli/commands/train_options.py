"""The options of `headrace train`: what is trained, and how its rows are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.ranges import RangeOptions
from headrace_cli.commands.shared import BusAddress, Config, DataDir

if TYPE_CHECKING:
    from headrace_operations.jobs.job import Job, RowOptions

_ROWS = "How rows are read"
_TRAINING = "What is trained"
_TOPIC = "Which records of a topic"


@dataclass(frozen=True)
class ReadingOptions:
    """How files are read as rows."""

    column: Annotated[
        list[str] | None,
        typer.Option(
            help="What a column is called in the files; may be repeated.", metavar="NAME=COLUMN", rich_help_panel=_ROWS
        ),
    ] = None
    form: Annotated[
        str | None,
        typer.Option("--format", help="The rows' format; default: by their columns.", rich_help_panel=_ROWS),
    ] = None
    split: Annotated[str | None, typer.Option(help="Of a folder that has several.", rich_help_panel=_ROWS)] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A field of messages to pass over; may be repeated.", metavar="FIELD", rich_help_panel=_ROWS),
    ] = None
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Take rows that say the same.", rich_help_panel=_ROWS)
    ] = False
    skip_bad: Annotated[
        int, typer.Option(min=0, help="So many bad rows may be left out.", metavar="N", rich_help_panel=_ROWS)
    ] = 0
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of tasks that no row may ask; may be repeated.", metavar="FILE", rich_help_panel=_ROWS
        ),
    ] = None
    gate_tasks: Annotated[
        bool,
        typer.Option("--gate-tasks/--no-gate-tasks", help="Nor those of the configured gate.", rich_help_panel=_ROWS),
    ] = True

    @property
    def chosen(self) -> RowOptions:
        """Raises `UsageError`."""
        from headrace_operations.jobs.job import RowOptions

        return RowOptions(
            columns=columns_of(self.column or []),
            form=self.form,
            split=self.split,
            ignored=frozenset(self.ignore or ()),
            keep_duplicates=self.keep_duplicates,
            skip_bad=self.skip_bad,
            held_out=tuple(self.held_out or ()),
            gate_tasks=self.gate_tasks,
        )


@dataclass(frozen=True)
class TrainingOptions:
    """What comes of the rows."""

    base: Annotated[
        Path | None,
        typer.Option(
            help="The model to begin with; default: trainer.base.", metavar="FOLDER", rich_help_panel=_TRAINING
        ),
    ] = None
    lineage: Annotated[
        str | None,
        typer.Option(help="Name of the line of versions; default: made of the job.", rich_help_panel=_TRAINING),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="How often each row is trained.", rich_help_panel=_TRAINING)] = 1
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle/--no-shuffle", help="Another order in each epoch.", rich_help_panel=_TRAINING),
    ] = True
    seed: Annotated[int, typer.Option(help="Of the order.", rich_help_panel=_TRAINING)] = 0
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", help="A setting for the job; may be repeated.", metavar="SECTION.KEY=VALUE",
            rich_help_panel=_TRAINING,
        ),
    ] = None  # fmt: skip
    offer: Annotated[
        bool,
        typer.Option("--offer", help="Tell the registry of the last version: probe, gate.", rich_help_panel=_TRAINING),
    ] = False


@dataclass(frozen=True)
class TopicRange(RangeOptions):
    """Of a topic, where that is the source."""


@dataclass(frozen=True)
class JobPlace:
    """Where it happens."""

    config: Config = None
    bus: BusAddress = None
    data_dir: DataDir = None


def columns_of(assignments: list[str]) -> dict[str, str]:
    """`NAME=COLUMN` as a mapping. Raises `UsageError`."""
    from headrace.errors import UsageError

    found = {}
    for one in assignments:
        name, sign, column = one.partition("=")
        if not (name and sign and column):
            raise UsageError(f"--column {one}: write NAME=COLUMN, e.g. --column prompt=question")
        found[name] = column
    return found


def job_of(kind: str, sources: list[str], rows: ReadingOptions, training: TrainingOptions, place: JobPlace) -> Job:
    """The options as a job. Raises `UsageError`."""
    from headrace_operations.jobs.job import Job
    from headrace_operations.supervisor.overrides import parse_assignments

    return Job(
        kind=kind,
        source=sources,
        base=training.base,
        lineage=training.lineage,
        settings=parse_assignments(training.settings or []),
        epochs=training.epochs,
        shuffle=training.shuffle,
        seed=training.seed,
        rows=rows.chosen,
        config=place.config,
        bus=place.bus,
        data_dir=place.data_dir,
        offer=training.offer,
    )
