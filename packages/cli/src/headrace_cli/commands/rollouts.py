"""`headrace rollouts`: list, show, watch, begin, stop, promote and roll back rollouts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace_cli.commands.model_options import Name, Reason, RegistryOptions, VersionName, full_name
from headrace_cli.commands.shared import AsJson, Commands, command, console, echo, echo_json, table

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas.http.registry_api import RolloutState

Rollout = Annotated[
    str,
    typer.Argument(
        help="Id of the rollout or its first characters, or MODEL for its newest rollout.", metavar="ROLLOUT"
    ),
]
Metric = Annotated[str | None, typer.Option("--metric", help="Metric of the chart; default: the first guardrail.")]
app = typer.Typer(cls=Commands, no_args_is_help=True, help="Manage rollouts: list, watch, stop, promote.")
_LIST_MAX = 1000
_ACTIVE_PHASES = ("shadow", "canary")


def list_rollouts(
    model: Annotated[str | None, typer.Argument(help="List only rollouts of this model.", metavar="MODEL")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_LIST_MAX, help="Maximum number of rollouts, newest first.")] = 20,
    *,
    registry: RegistryOptions,
    json: AsJson = False,
) -> None:
    """List rollouts with phase, share and last reason, newest first."""
    from headrace.rollouts import Rollouts

    with registry.open() as api:
        rollouts = Rollouts(api).list(model, limit=limit)
    if json:
        echo_json("[" + ", ".join(rollout.model_dump_json() for rollout in rollouts) + "]")
        return
    columns = ["rollout", "version", "kind", "phase", "share>", "units>", "control>", "watched>", "why"]
    console().print(table(columns, [_row(rollout) for rollout in rollouts]))


def show(
    rollout: Rollout,
    metric: Metric = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also write a picture (needs matplotlib).", metavar="FILE")
    ] = None,
    *,
    registry: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Show one rollout: decisions with reasons, metrics, and the confidence sequence as a chart."""
    from headrace_operations import charts
    from headrace_runtime.rollout_picture import intervals, metric_of

    with registry.open() as api:
        state = _find_rollout(api, rollout)
    if json:
        echo_json(state.model_dump_json())
        return
    for event in state.decisions:
        kind = event.rollout.kind.replace("_", " ") if event.rollout else event.decision
        author = f", asked by {event.who}" if event.who else ""
        console().print(f"{event.time:%Y-%m-%d %H:%M:%S}  [bold]{kind}[/]  {event.reason or ''}{author}")
    for line in charts.summarize_shadow(state):
        console().print(line)
    console().print(table(["metric", "difference>", "from>", "to>", "margin>"], intervals(state)))
    echo("\n".join(charts.draw_lines(state, metric or metric_of(state))))
    if png is not None:
        _write_picture(state, metric, png)


def report(
    rollout: Rollout,
    metric: Metric = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: VERSION-PHASE.png.", metavar="FILE")
    ] = None,
    *,
    registry: RegistryOptions,
) -> None:
    """Write a page about one rollout as PNG: confidence sequence, metrics and decisions.

    The registry writes such a page after each step into `registry/rollouts` of its data directory.
    """
    with registry.open() as api:
        state = _find_rollout(api, rollout)
    path = out or Path(f"{state.version.replace('@', '-')}-{state.phase}.png")
    _write_picture(state, metric, path)
    console().print(f"written: {path}")


def _write_picture(state: RolloutState, metric: str | None, path: Path) -> None:
    from headrace.errors import UsageError
    from headrace_runtime.rollout_picture import metric_of, picture

    if not picture(state, metric or metric_of(state), path):
        raise UsageError("matplotlib is not installed; install it to write a picture")


def watch(
    rollout: Rollout,
    metric: Metric = None,
    every: Annotated[float, typer.Option(help="Seconds between two updates.", min=0.2)] = 2.0,
    *,
    registry: RegistryOptions,
) -> None:
    """Draw the confidence sequence until the rollout ends. Exit status 0 for a promotion, otherwise 1.

    If the output is not a terminal, a line is printed after each change.
    """
    with registry.open() as api:
        state = _find_rollout(api, rollout)
        last = (
            _watch_chart(api, state, metric, every) if sys.stdout.isatty() else _watch_lines(api, state, metric, every)
        )
    if last.phase not in ("champion", "succeeded"):
        raise typer.Exit(1)


def begin(
    name: Name,
    version: VersionName,
    kind: Annotated[
        Literal["canary", "ab", "rolling"], typer.Option(help="Kind of the rollout, see docs/rollouts.md.")
    ] = "canary",
    share: Annotated[str | None, typer.Option(help="Fixed share, such as 1/20, instead of the stages.")] = None,
    reason: Reason = "",
    *,
    registry: RegistryOptions,
) -> None:
    """Begin a rollout of a version, whatever `registry.rollout.kind` is. The version passes the gate first."""
    from headrace.rollouts import Rollouts

    with registry.open() as api:
        full = full_name(api, name, version)
        Rollouts(api).begin(name, full, kind=kind, share=share, reason=reason)
    console().print(f"{full} is a candidate now; follow it with [bold]headrace rollouts watch {name}[/]")


def stop(rollout: Rollout, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Hold a rollout: its version gets no more turns, but it and its descendants are not rejected."""
    _end_rollout(registry, rollout, "stop", reason)


def promote(rollout: Rollout, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Promote the version at once, without waiting for more evidence."""
    _end_rollout(registry, rollout, "promote", reason)


def rollback(rollout: Rollout, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Roll back the candidate of a rollout: it and the versions trained from it never serve again."""
    _end_rollout(registry, rollout, "roll_back", reason)


def _end_rollout(registry: RegistryOptions, rollout: str, action: str, reason: str) -> None:
    from headrace.rollouts import Rollouts

    with registry.open() as api:
        state = getattr(Rollouts(api), action)(_find_rollout(api, rollout).id, reason=reason)
    console().print(f"{state.version}: [bold]{state.phase.replace('_', ' ')}[/] {state.reason}")


def _find_rollout(api: ModelRegistry, name: str) -> RolloutState:
    """Return the rollout with this id, the beginning of an id, or the newest rollout of a model with this name.

    Raises:
        UsageError: no rollout or several rollouts match.
    """
    from headrace.errors import UsageError
    from headrace.rollouts import Rollouts

    rollouts = Rollouts(api)
    states = rollouts.list(limit=_LIST_MAX)
    of_model = [state.id for state in states if state.model == name][:1]
    matches = of_model or [state.id for state in states if state.id.startswith(name)]
    if len(matches) != 1:
        problem = f"matches {len(matches)} rollouts" if matches else "is neither a model with rollouts nor a rollout"
        raise UsageError(f"{name}: {problem}; see `headrace rollouts list`")
    return rollouts.get(matches[0])


def _watch_lines(api: ModelRegistry, state: RolloutState, metric: str | None, every_s: float) -> RolloutState:
    from headrace.rollouts import Rollouts

    printed = ""
    while True:
        line = status_line(state, metric)
        if line != printed:
            echo(line)
            printed = line
        if state.phase not in _ACTIVE_PHASES:
            return state
        time.sleep(every_s)
        state = Rollouts(api).get(state.id)


def _watch_chart(api: ModelRegistry, state: RolloutState, metric: str | None, every_s: float) -> RolloutState:
    from rich.live import Live
    from rich.text import Text

    from headrace.rollouts import Rollouts
    from headrace_operations import charts
    from headrace_runtime.rollout_picture import metric_of

    with Live(console=console(), auto_refresh=False) as screen:
        while True:
            chart_lines = charts.draw_lines(state, metric or metric_of(state), width=max(20, screen.console.width - 12))
            screen.update(Text("\n".join([status_line(state, metric), *chart_lines])), refresh=True)
            if state.phase not in _ACTIVE_PHASES:
                return state
            time.sleep(every_s)
            state = Rollouts(api).get(state.id)


def status_line(state: RolloutState, metric: str | None) -> str:
    """Return the state of a rollout and the newest interval of a metric as one line."""
    from headrace_runtime.rollout_picture import metric_of

    name = metric or metric_of(state)
    ends = [state.statistics.get(f"{name}.{part}") for part in ("difference", "lower", "upper")]
    values = [end for end in ends if end is not None]
    interval = "{:+.3f} in [{:+.3f}, {:+.3f}]".format(*values) if len(values) == len(ends) else "not read yet"
    arms = f"{state.statistics.get('candidate_units', 0):g}/{state.statistics.get('control_units', 0):g} units"
    exposure = f"  met by {state.statistics['exposure']:.1%}" if "exposure" in state.statistics else ""
    reason = "" if state.phase in _ACTIVE_PHASES else f"  {state.reason}"
    if state.phase == "shadow":
        arms = f"{state.statistics.get('shadow_units', 0):g}/{state.shadow_units} prompts"
    progress = f"{state.version}  {state.phase.replace('_', ' ')}  share {state.share}  {arms}"
    return f"{progress}  {name} {interval}{exposure}{reason}"


def _row(state: RolloutState) -> tuple[str, ...]:
    numbers = state.statistics
    return (
        state.id,
        state.version,
        state.kind,
        state.phase.replace("_", " "),
        state.share,
        f"{numbers.get('candidate_units', 0):g}",
        f"{numbers.get('control_units', 0):g}",
        f"{state.watched_s:.0f} s",
        state.reason,
    )


def add_to(parent: typer.Typer) -> None:
    command(app, list_rollouts, "headrace rollouts list", "headrace rollouts list email-agent --json", name="list")
    command(app, show, "headrace rollouts show email-agent", "headrace rollouts show 01a2 --metric length --png it.png")
    command(app, report, "headrace rollouts report email-agent", "headrace rollouts report 01a2 --out it.png")
    command(app, watch, "headrace rollouts watch email-agent", "headrace rollouts watch email-agent --metric missing")
    command(
        app, begin, "headrace rollouts begin email-agent 3f9c2d --share 1/20", "headrace rollouts begin m 3f --kind ab"
    )
    command(app, stop, 'headrace rollouts stop email-agent --reason "a holiday"')
    command(app, promote, 'headrace rollouts promote email-agent --reason "good enough for us"')
    command(app, rollback, 'headrace rollouts rollback email-agent --reason "complaints"')
    parent.add_typer(app, name="rollouts")
