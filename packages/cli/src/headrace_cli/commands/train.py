"""`headrace train`: training on files or on a range of a topic, with the output of row checks and jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.shared import AsJson, command, console, echo_json, progress, table
from headrace_cli.commands.train_options import JobLocation, ReadingOptions, TopicRange, TrainingOptions, job_of

if TYPE_CHECKING:
    from rich.text import Text

    from headrace.topics import Range
    from headrace_operations.jobs.checks import CheckReport, PreviewRow
    from headrace_operations.jobs.job import Job
    from headrace_operations.jobs.runner import JobResult
    from headrace_schemas.programs import WrittenBranch

_RECIPE_SUFFIX = ".toml"
_REFUSALS_PRINTED_MAX = 20
_TRAINED, _CONTEXT = "bold black on green", "dim"


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
        _train_on_topic(kind, range_options.range_of(topic), training, location, json=json)
    else:
        job = job_of(kind, source_names, rows, training, location)
        if check or preview:
            _check_rows(job, preview, json=json)
        else:
            _train_on_rows(job, json=json)


def _check_rows(job: Job, preview: int, *, json: bool) -> None:
    import asyncio

    from headrace_operations.jobs import runner
    from headrace_operations.jobs.job import prepare

    prepared = prepare(job)
    with progress("reading the rows") as tick:
        report = asyncio.run(runner.check(prepared, tick, preview))
    if json:
        echo_json(checked_as_json(report))
    else:
        show_checked(report)
    if report.bad > job.rows.skip_bad or not report.kept:
        raise typer.Exit(1)


def _train_on_rows(job: Job, *, json: bool) -> None:
    import asyncio

    from headrace_operations.jobs import runner
    from headrace_operations.jobs.job import prepare

    prepared = prepare(job)
    with progress(job.kind) as tick:
        result = asyncio.run(runner.train(prepared, tick))
    if json:
        echo_json(as_json(result))
    else:
        show(result)


def _train_on_topic(
    kind: str, topic_range: Range, training: TrainingOptions, location: JobLocation, *, json: bool
) -> None:
    import asyncio

    from headrace_cli.commands.replay import as_json, show
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
    from headrace_operations.jobs import recipe

    with progress(f"training {path.name}") as tick:
        results = recipe.run(
            recipe.read(path),
            recipe.StageEnvironment(location.config, location.bus, location.data_dir),
            tick,
            training.offer,
        )
    if json:
        echo_json(stages_as_json(results))
    else:
        for result in results:
            show(result)


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


def checked_as_json(report: CheckReport) -> str:
    """Return all counts of a check report as JSON."""
    return json.dumps(_report_fields(report), indent=1)


def as_json(result: JobResult) -> str:
    return json.dumps(_result_fields(result), indent=1)


def stages_as_json(results: Iterable[JobResult]) -> str:
    return json.dumps([_result_fields(result) for result in results], indent=1)


def show_checked(report: CheckReport) -> None:
    """Print the counts of the checked rows, the refused rows, and how the first rows would be trained."""
    out = console()
    for row in report.shown:
        _show_row(row)
    rows = [("read", str(report.rows)), ("can be trained", str(report.kept))]
    rows += [(f"bad: {kind}", str(count)) for kind, count in report.refused.most_common()]
    out.print(table(["rows", "count>"], rows))
    if report.kept:
        spread = ", ".join(f"{name} {value}" for name, value in report.spread().items())
        out.print(f"tokens of a sequence: {spread}; at most {report.tokens_max} can be trained", markup=False)
        total = sum(report.lengths)
        out.print(f"{report.trained_tokens} of {total} tokens are trained, in {report.experiences} sequences")
    if report.forks:
        out.print(
            f"[yellow]{report.forks} more sequences than answers[/]: the chat template renders earlier messages "
            "differently in later turns (it may drop reasoning), so their rows are trained in parts"
        )
    if report.unread:
        columns = ", ".join(f"{name} ({count})" for name, count in report.unread.most_common(20))
        out.print(f"columns that are not read: {columns}", markup=False)
    if not report.held_out:
        out.print(
            "[yellow]rows were not compared with held-out tasks[/]: name files with --held-out, or configure a gate"
        )
    for refusal in report.refusals[:_REFUSALS_PRINTED_MAX]:
        out.print(str(refusal), style="red", markup=False)
    if report.bad > _REFUSALS_PRINTED_MAX:
        out.print(f"and {report.bad - _REFUSALS_PRINTED_MAX} more; --json lists up to 1000")


def show(result: JobResult) -> None:
    """Print what a job trained, and the command for the next step."""
    out = console()
    journal = result.journal
    rows = [("rows", "trained", str(journal.rows))]
    rows += [("rows", "skipped", str(journal.skipped))] if journal.skipped else []
    rows += [("experiences", "trained", str(journal.trained))]
    rows += [("experiences", f"dropped: {reason}", str(count)) for reason, count in sorted(journal.dropped.items())]
    rows += [("experiences", "waiting, too few for a batch", str(journal.waiting))] if journal.waiting else []
    out.print(table(["", "", "count>"], rows, f"{journal.kind}, {len(journal.batches)} batches"))
    out.print(f"[green]done[/]: {result.version} is the last version of lineage {result.lineage}")
    if result.offered:
        out.print(f"the version is offered; follow it with [bold]headrace models show {journal.model}[/]")
    else:
        out.print(f"it is not served; [bold]headrace replay offer {result.lineage}[/] lets the registry evaluate it")


def segments(branch: WrittenBranch) -> Iterator[tuple[str, bool]]:
    """Yield each piece of text of a branch with whether it is trained."""
    return ((text, index % 2 == 1) for index, text in enumerate(branch.texts) if text)


def colour_text(branch: WrittenBranch, *, colour: bool) -> Text:
    """Return the text of a branch. Trained text is green, or between ⟦ and ⟧ if colours are not available."""
    from rich.text import Text

    result = Text()
    for text, trained in segments(branch):
        result.append(text if colour or not trained else f"⟦{text}⟧", style=_TRAINED if trained else _CONTEXT)
    return result


def _show_row(row: PreviewRow) -> None:
    out = console()
    for side, branches in enumerate(row.answers):
        for part, branch in enumerate(branches):
            title = f"{row.file}, row {row.row}"
            title += f", {('chosen', 'rejected')[side]}" if len(row.answers) == 2 else ""
            title += f", part {part + 1}" if len(branches) > 1 else ""
            trained = sum(span.length for span in branch.spans)
            out.print(f"── {title}: {len(branch.token_ids)} tokens, {trained} trained", markup=False, style="bold")
            out.print(colour_text(branch, colour=out.is_terminal))


def _report_fields(report: CheckReport) -> dict[str, Any]:
    output = asdict(report)
    # asdict rebuilds counters from their items and so counts the items
    output |= {"unread": dict(report.unread), "refused": dict(report.refused)}
    del output["lengths"]
    output["shown"] = [
        {
            "file": row.file,
            "row": row.row,
            "answers": [[{"tokens": len(b.token_ids), "texts": b.texts} for b in branches] for branches in row.answers],
        }
        for row in report.shown
    ]
    return {**output, "tokens": report.spread(), "bad": report.bad}


def _result_fields(result: JobResult) -> dict[str, Any]:
    fields = result.journal.model_dump(mode="json")
    checked = _report_fields(result.checked) if result.checked is not None else None
    return {"lineage": result.lineage, "offered": result.offered, **fields, "checked": checked}
