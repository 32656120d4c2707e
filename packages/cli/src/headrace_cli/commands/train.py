"""`headrace train`: training on files or on a range of a topic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import AsJson, command, echo_json, progress
from headrace_cli.commands.train_options import JobLocation, ReadingOptions, TopicRange, TrainingOptions, job_of

if TYPE_CHECKING:
    from headrace.topics import Range
    from headrace_operations.jobs.job import Job

_RECIPE_SUFFIX = ".toml"


def _algorithm_names() -> list[str]:
    """Return the names of all algorithms, for completion."""
    from headrace_operations.jobs.job import ALGORITHMS

    return list(ALGORITHMS.names())


def train(
    kind: Annotated[
        str,
        typer.Argument(
            help="Algorithm (sft, dpo, ...), or a recipe with several stages (a TOML file).",
            metavar="ALGORITHM|RECIPE",
            autocompletion=_algorithm_names,
        ),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Files or folders of rows, or topic:experiences.", metavar="SOURCE"),
    ] = None,
    *,
    rows: ReadingOptions,
    training: TrainingOptions,
    range_options: TopicRange,
    location: JobLocation,
    check: Annotated[bool, typer.Option("--check", help="Check every row without training.")] = False,
    preview: Annotated[
        int, typer.Option(min=0, help="Check every row and show the first N as they would be trained.", metavar="N")
    ] = 0,
    json: AsJson = False,
) -> None:
    """Train a model on rows of files or on recorded events of topics.

    The rows are checked first, and invalid ones are listed with number and reason. Then a trainer trains a lineage on
    them, independently of running services. The same command resumes an interrupted job.

    The versions are not served before one is offered to the registry: --offer, or `headrace replay offer LINEAGE`.
    """
    from headrace.errors import UsageError
    from headrace_operations.jobs.from_topics import source_topic

    source_names = sources or []
    if kind.endswith(_RECIPE_SUFFIX):
        if source_names:
            raise UsageError(f"{kind}: a recipe names its own sources; omit {source_names[0]}")
        _train_recipe(Path(kind), training, location, json=json)
    elif kind not in _algorithm_names() and (source_topic([kind]) or Path(kind).suffix or Path(kind).exists()):
        raise UsageError(f"headrace train {kind}: ALGORITHM is missing; write for example `headrace train sft {kind}`")
    elif not source_names:
        raise UsageError(
            f"headrace train {kind}: SOURCE is missing; name files or folders of rows, or topic:experiences"
        )
    elif (topic := source_topic(source_names)) is not None:
        if check or preview:
            raise UsageError("--check and --preview apply to rows of files; use `headrace replay plan` for a topic")
        _train_on_topic(kind, range_options.of(topic), training, location, json=json)
    else:
        job = job_of(kind, source_names, rows, training, location)
        if check or preview:
            _check_rows(job, preview, json=json)
        else:
            _train_on_rows(job, json=json)


def _check_rows(job: Job, preview: int, *, json: bool) -> None:
    import asyncio

    from headrace_cli.commands import train_report
    from headrace_operations.jobs import runner
    from headrace_operations.jobs.job import prepare

    prepared = prepare(job)
    with progress("reading the rows") as tick:
        report = asyncio.run(runner.check(prepared, tick, preview))
    if json:
        echo_json(train_report.checked_as_json(report))
    else:
        train_report.show_checked(report)
    if report.bad > job.rows.skip_bad or not report.kept:
        raise typer.Exit(1)


def _train_on_rows(job: Job, *, json: bool) -> None:
    import asyncio

    from headrace_cli.commands import train_report
    from headrace_operations.jobs import runner
    from headrace_operations.jobs.job import prepare

    prepared = prepare(job)
    with progress(job.kind) as tick:
        result = asyncio.run(runner.train(prepared, tick))
    if json:
        echo_json(train_report.as_json(result))
    else:
        train_report.show(result)


def _train_on_topic(
    kind: str, topic_range: Range, training: TrainingOptions, location: JobLocation, *, json: bool
) -> None:
    import asyncio

    from headrace_cli.commands.replay_report import as_json, show
    from headrace_operations.jobs import from_topics

    request = from_topics.replay_request(kind, topic_range, job_of(kind, [], ReadingOptions(), training, location))
    with progress("reading the journal") as tick:
        report = asyncio.run(from_topics.train(request, tick))
    if training.offer:
        asyncio.run(from_topics.offer_last_version(request))
    if json:
        echo_json(as_json(report))
    else:
        show(report, planned=False)


def _train_recipe(path: Path, training: TrainingOptions, location: JobLocation, *, json: bool) -> None:
    from headrace_cli.commands import train_report
    from headrace_operations.jobs import recipe

    with progress(f"training {path.name}") as tick:
        results = recipe.run(
            recipe.read(path),
            recipe.StageEnvironment(location.config, location.bus, location.data_dir),
            tick,
            training.offer,
        )
    if json:
        echo_json(train_report.stages_as_json(results))
    else:
        for result in results:
            train_report.show(result)


def add_to(app: typer.Typer) -> None:
    command(
        app,
        train,
        "headrace train sft written.jsonl --base models/base --epochs 2",
        "headrace train sft data/ --split train --column prompt=question --column completion=response --preview 3",
        "headrace train dpo pairs.jsonl --base models/base --set trainer.lora.rank=16 --offer",
        "headrace train reinforce++ topic:experiences --since 7d --config headrace.toml --lineage again",
        "headrace train recipe.toml",
    )
