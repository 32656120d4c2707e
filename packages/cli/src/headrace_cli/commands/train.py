"""`headrace train`: from files, or a range of a topic, to a version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import AsJson, command, echo_json, progress
from headrace_cli.commands.train_options import JobPlace, ReadingOptions, TopicRange, TrainingOptions, job_of

if TYPE_CHECKING:
    from headrace.topics import Range
    from headrace_operations.jobs.job import Job

_RECIPE = ".toml"


def _known() -> list[str]:
    """To complete a word with."""
    from headrace_operations.jobs.job import ALGORITHMS

    return list(ALGORITHMS.names())


def train(
    kind: Annotated[
        str,
        typer.Argument(
            help="The algorithm (sft, dpo, ...), or a recipe of several stages (a TOML file).",
            metavar="ALGORITHM|RECIPE",
            autocompletion=_known,
        ),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Files or folders with rows, or topic:experiences.", metavar="SOURCE"),
    ] = None,
    *,
    rows: ReadingOptions,
    training: TrainingOptions,
    chosen: TopicRange,
    place: JobPlace,
    check: Annotated[bool, typer.Option("--check", help="Look at every row, and train nothing.")] = False,
    preview: Annotated[
        int, typer.Option(min=0, help="The same, and show the first rows as they would be trained.", metavar="N")
    ] = 0,
    json: AsJson = False,
) -> None:
    """Train a model on rows that somebody wrote, or on what topics hold.

    The rows are checked first: bad ones are refused with their numbers and reasons. Then a trainer makes a lineage of
    them, beside whatever runs. The same command again goes on where a job was interrupted, however it was.

    Nothing serves the versions before the registry is told of one: --offer, or `headrace replay offer LINEAGE`.
    """
    from headrace.errors import UsageError
    from headrace_operations.jobs.from_topics import topic_of

    given = sources or []
    if kind.endswith(_RECIPE):
        if given:
            raise UsageError(f"{kind} names its sources itself; leave out {given[0]}")
        _recipe(Path(kind), training, place, json=json)
    elif not given:
        raise UsageError(f"headrace train {kind}: name files or folders with rows, or topic:experiences")
    elif (topic := topic_of(given)) is not None:
        if check or preview:
            raise UsageError("--check and --preview look at rows of files; for a topic there is `headrace replay plan`")
        _topic(kind, chosen.of(topic), training, place, json=json)
    else:
        job = job_of(kind, given, rows, training, place)
        if check or preview:
            _look(job, preview, json=json)
        else:
            _run(job, json=json)


def _look(job: Job, preview: int, *, json: bool) -> None:
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


def _run(job: Job, *, json: bool) -> None:
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


def _topic(kind: str, wanted: Range, training: TrainingOptions, place: JobPlace, *, json: bool) -> None:
    import asyncio

    from headrace_cli.commands.replay_report import as_json, show
    from headrace_operations.jobs import from_topics

    request = from_topics.request_of(kind, wanted, job_of(kind, [], ReadingOptions(), training, place))
    with progress("reading the journal") as tick:
        report = asyncio.run(from_topics.train(request, tick))
    if training.offer:
        asyncio.run(from_topics.offer_last(request))
    if json:
        echo_json(as_json(report))
    else:
        show(report, planned=False)


def _recipe(path: Path, training: TrainingOptions, place: JobPlace, *, json: bool) -> None:
    from headrace_cli.commands import train_report
    from headrace_operations.jobs import recipe

    with progress(f"training {path.name}") as tick:
        results = recipe.run(
            recipe.read(path), recipe.StagePlace(place.config, place.bus, place.data_dir), tick, training.offer
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
