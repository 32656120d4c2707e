"""`headrace evaluate`: metrics of one exact version on tasks, with confidence intervals."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import AsJson, DataDir, command, console, echo_json, progress, running_state, table

if TYPE_CHECKING:
    from headrace_operations.evaluation.runner import Evaluation

_DIGITS = 4


def evaluate(
    version: Annotated[
        str,
        typer.Argument(help="Version to evaluate; omitted with --gate.", metavar="MODEL@DIGEST", show_default=False),
    ] = "",
    *,
    tasks: Annotated[Path, typer.Option(help="File of tasks, JSON lines.", metavar="FILE")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            help="Metric by name or as FILE.py:NAME; may be repeated. Default: all that apply to the tasks.",
            metavar="NAME",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(help="Function that plays a task; default: the built-in agent.", metavar="FILE.py:NAME"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="URL of the gateway with /v1; default: the gateway that runs here.", metavar="URL"),
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the gateway.", show_default=False)
    ] = None,
    plays: Annotated[int, typer.Option(min=1, help="Number of plays of each task.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the agent.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Number of concurrent plays.")] = 8,
    max_calls: Annotated[int, typer.Option(min=1, help="Maximum number of model calls in one play.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens of each answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Sampling temperature; default: that of the service.")
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Serve as a gate program: read plays from standard input.")
    ] = False,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Evaluate one version on tasks: success, steps, format, tools, arguments, recall and custom metrics.

    Intervals are 95 % confidence intervals: Wilson's for binary values of single plays, otherwise a bootstrap over
    tasks. The plays are never trained. A failed play ends the evaluation with status 1, because it is not a wrong
    answer.
    """
    from headrace.errors import UsageError
    from headrace_operations.evaluation import runner
    from headrace_operations.evaluation import tasks as files

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    options = runner.EvaluationOptions(
        base_url=url or running_state(data_dir).base_url or "",
        key=key,
        metrics=tuple(metric or ()),
        agent=agent,
        plays=plays,
        seed=seed,
        concurrency=concurrency,
        calls_max=max_calls,
        body={name: value for name, value in sampling.items() if value is not None},
    )
    loaded_tasks = files.read(tasks)
    if gate:
        if version:
            raise UsageError(f"--gate: the registry chooses the versions; omit {version}")
        runner.serve(loaded_tasks, options)
        return
    with progress(f"evaluating {version}") as tick:
        result = runner.evaluate(version, loaded_tasks, options, tick)
    if json:
        echo_json(json_module.dumps(asdict(result), indent=1))
    else:
        _show(result)


def _show(result: Evaluation) -> None:
    rows = [
        (
            name,
            f"{measurement.mean:.{_DIGITS}g}",
            f"{measurement.low:.{_DIGITS}g} to {measurement.high:.{_DIGITS}g}",
            str(measurement.count),
            measurement.interval,
        )
        for name, measurement in result.metrics.items()
    ]
    out = console()
    out.print(table(["metric", "mean>", "95 %", "plays>", "interval"], rows, f"{result.version}, {result.tasks} tasks"))
    for name, count in result.unmeasured.items():
        out.print(f"{name}: does not apply to {count} plays", markup=False)


def add_to(app: typer.Typer) -> None:
    command(
        app,
        evaluate,
        "headrace evaluate support@3f9c2d41aa07b6e5 --tasks held_out.jsonl",
        "headrace evaluate support@3f9c2d41aa07b6e5 --tasks held_out.jsonl -m success -m my.py:kind --plays 4 --json",
        "headrace evaluate --gate --tasks held_out.jsonl -m success --url http://127.0.0.1:8000/v1",
    )
