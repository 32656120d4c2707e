"""Options of `headrace train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import BusAddress, Config, DataDir, RangeOptions

if TYPE_CHECKING:
    from headrace_operations.jobs.job import Job, RowOptions

_ROWS_PANEL = "Rows"
_TRAINING_PANEL = "Training"


@dataclass(frozen=True)
class ReadingOptions:
    """Command line options of `headrace train` about the format and the columns of data files."""

    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Map a column of the format to a column of the files; may be repeated.",
            metavar="NAME=COLUMN",
            rich_help_panel=_ROWS_PANEL,
        ),
    ] = None
    form: Annotated[
        str | None,
        typer.Option("--format", help="Row format; default: determined by the columns.", rich_help_panel=_ROWS_PANEL),
    ] = None
    split: Annotated[
        str | None, typer.Option(help="Split of a folder that has several.", rich_help_panel=_ROWS_PANEL)
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Ignore this field of messages; may be repeated.", metavar="FIELD", rich_help_panel=_ROWS_PANEL
        ),
    ] = None
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Train identical rows as well.", rich_help_panel=_ROWS_PANEL)
    ] = False
    skip_bad: Annotated[
        int,
        typer.Option(min=0, help="Maximum number of invalid rows to skip.", metavar="N", rich_help_panel=_ROWS_PANEL),
    ] = 0
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of held-out tasks that no row may contain; may be repeated.",
            metavar="FILE",
            rich_help_panel=_ROWS_PANEL,
        ),
    ] = None
    gate_tasks: Annotated[
        bool,
        typer.Option(
            "--gate-tasks/--no-gate-tasks",
            help="Refuse rows that contain tasks of the configured gate.",
            rich_help_panel=_ROWS_PANEL,
        ),
    ] = True

    @property
    def row_options(self) -> RowOptions:
        """The command line options as `RowOptions`. Raises `UsageError` if a column is invalid."""
        from headrace_operations.jobs.job import RowOptions

        return RowOptions(
            columns=parse_columns(self.column or []),
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
    """Options that determine the base, the settings and the lineage of a training."""

    base: Annotated[
        str | None,
        typer.Option(
            help="Base model, a folder or ORG/NAME of the hub; default: trainer.base.",
            metavar="BASE",
            rich_help_panel=_TRAINING_PANEL,
        ),
    ] = None
    lineage: Annotated[
        str | None,
        typer.Option(help="Name of the lineage; default: derived from the job.", rich_help_panel=_TRAINING_PANEL),
    ] = None
    epochs: Annotated[
        int, typer.Option(min=1, help="Number of times each row is trained.", rich_help_panel=_TRAINING_PANEL)
    ] = 1
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle/--no-shuffle", help="Use a random order in each epoch.", rich_help_panel=_TRAINING_PANEL
        ),
    ] = True
    seed: Annotated[int, typer.Option(help="Seed of the order.", rich_help_panel=_TRAINING_PANEL)] = 0
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", help="Override a setting for the job; may be repeated.", metavar="SECTION.KEY=VALUE",
            rich_help_panel=_TRAINING_PANEL,
        ),
    ] = None  # fmt: skip
    offer: Annotated[
        bool,
        typer.Option(
            "--offer",
            help="Offer the last version to the registry, which probes and evaluates it.",
            rich_help_panel=_TRAINING_PANEL,
        ),
    ] = False


@dataclass(frozen=True)
class TopicRange(RangeOptions):
    """Options that select the range of the topic to train on."""


@dataclass(frozen=True)
class JobLocation:
    """Options that select the settings file, the bus and the data directory of a job."""

    config: Config = None
    bus: BusAddress = None
    data_dir: DataDir = None


def parse_columns(assignments: list[str]) -> dict[str, str]:
    """Parse `--column NAME=COLUMN` options.

    Raises:
        UsageError: an option has another form.
    """
    from headrace.errors import UsageError

    columns = {}
    for assignment in assignments:
        name, separator, column = assignment.partition("=")
        if not (name and separator and column):
            raise UsageError(f"--column {assignment}: the form is NAME=COLUMN, for example prompt=question")
        columns[name] = column
    return columns


def job_of(
    kind: str, sources: list[str], rows: ReadingOptions, training: TrainingOptions, location: JobLocation
) -> Job:
    """Build a job from the command line options. Raises `UsageError` if an option is invalid."""
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
        rows=rows.row_options,
        config=location.config,
        bus=location.bus,
        data_dir=location.data_dir,
        offer=training.offer,
    )
