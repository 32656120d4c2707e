"""`headrace evaluate`: what one exact version does on tasks, with intervals."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import AsJson, DataDir, command, console, echo_json, progress, running, table

if TYPE_CHECKING:
    from headrace_operations.evaluation.runner import Evaluation

_EXACT = 4


def evaluate(
    version: Annotated[
        str, typer.Argument(help="Which version; none with --gate.", metavar="MODEL@DIGEST", show_default=False)
    ] = "",
    *,
    tasks: Annotated[Path, typer.Option(help="JSON lines, a task each.", metavar="FILE")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            help="A name, or FILE.py:NAME; may be repeated. Default: what the tasks allow.",
            metavar="NAME",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(help="A function that plays a task; default: one that needs nothing.", metavar="FILE.py:NAME"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The gateway, with /v1; default: of what runs here.", metavar="URL")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="An API key of the gateway.", show_default=False)
    ] = None,
    plays: Annotated[int, typer.Option(min=1, help="Of each task.")] = 1,
    seed: Annotated[int, typer.Option(help="Of sampling, and of what the agent draws.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Plays at a time.")] = 8,
    max_calls: Annotated[int, typer.Option(min=1, help="Calls of the model in one play.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of each answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Default: the service's.")] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Be a gate's program: read plays from standard input.")] = False,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Play tasks with one version and measure: success, steps, format, tools, arguments, recall, metrics of yours.

    Intervals are of 95 %: Wilson's for shares of single plays, else a bootstrap over tasks. Nothing of it is trained. A
    play that fails ends the evaluation with status 1: it is no wrong answer.
    """
    from headrace.errors import UsageError
    from headrace_operations.evaluation import gate_program, runner
    from headrace_operations.evaluation import tasks as files

    chosen = {"max_tokens": max_tokens, "temperature": temperature}
    options = runner.EvaluationOptions(
        base_url=url or running(data_dir).base_url or "",
        key=key,
        metrics=tuple(metric or ()),
        agent=agent,
        plays=plays,
        seed=seed,
        concurrency=concurrency,
        calls_max=max_calls,
        body={name: value for name, value in chosen.items() if value is not None},
    )
    found = files.read(tasks)
    if gate:
        if version:
            raise UsageError(f"--gate: the registry says which versions are played; leave out {version}")
        gate_program.serve(found, options)
        return
    with progress(f"evaluating {version}") as tick:
        result = runner.evaluate(version, found, options, tick)
    if json:
        echo_json(json_module.dumps(asdict(result), indent=1))
    else:
        _show(result)


def _show(result: Evaluation) -> None:
    rows = [
        (name, f"{one.mean:.{_EXACT}g}", f"{one.low:.{_EXACT}g} to {one.high:.{_EXACT}g}", str(one.count), one.interval)
        for name, one in result.metrics.items()
    ]
    out = console()
    out.print(table(["metric", "mean>", "95 %", "plays>", "interval"], rows, f"{result.version}, {result.tasks} tasks"))
    for name, count in result.unmeasured.items():
        out.print(f"{name}: {count} plays of tasks that say nothing about it", markup=False)


def add_to(app: typer.Typer) -> None:
    command(
        app,
        evaluate,
        "headrace evaluate support@3f9c2d41aa07b6e5 --tasks held_out.jsonl",
        "headrace evaluate support@3f9c2d41aa07b6e5 --tasks held_out.jsonl -m success -m my.py:kind --plays 4 --json",
        "headrace evaluate --gate --tasks held_out.jsonl -m success --url http://127.0.0.1:8000/v1",
    )
