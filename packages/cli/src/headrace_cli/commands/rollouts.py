"""`headrace rollouts`: versions on live traffic: list, show, report, watch, begin, stop, promote, roll back."""

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
    from headrace_schemas.rollout_api import RolloutState

Rollout = Annotated[
    str,
    typer.Argument(help="Its id, the first letters of it, or the MODEL, for that model's newest.", metavar="ROLLOUT"),
]
Metric = Annotated[str | None, typer.Option("--metric", help="Which one is drawn; the first guardrail unless said.")]
app = typer.Typer(cls=Commands, no_args_is_help=True, help="Versions on live traffic: list, watch, stop, promote.")
_LIST_MAX = 1000
_UNDER_WAY = ("shadow", "canary")


def list_rollouts(
    model: Annotated[str | None, typer.Argument(help="Of this model alone.", metavar="MODEL")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_LIST_MAX, help="How many, the newest first.")] = 20,
    *,
    at: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Rollouts with their phase, share and last reason, the newest first."""
    from headrace.rollouts import Rollouts

    with at.open() as api:
        found = Rollouts(api).list(model, limit=limit)
    if json:
        echo_json("[" + ", ".join(one.model_dump_json() for one in found) + "]")
        return
    columns = ["rollout", "version", "kind", "phase", "share>", "units>", "control>", "watched>", "why"]
    console().print(table(columns, [_row(one) for one in found]))


def show(
    rollout: Rollout,
    metric: Metric = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also as a picture; needs matplotlib.", metavar="FILE")
    ] = None,
    *,
    at: RegistryOptions,
    json: AsJson = False,
) -> None:
    """One rollout: its decisions with their reasons, the metrics, and the confidence sequence as a chart."""
    from headrace_operations.rollouts import chart, shadow
    from headrace_runtime.rollout_picture import intervals, metric_of

    with at.open() as api:
        found = _get(api, rollout)
    if json:
        echo_json(found.model_dump_json())
        return
    for event in found.decisions:
        kind = event.rollout.kind.replace("_", " ") if event.rollout else event.decision
        asked = f", asked by {event.who}" if event.who else ""
        console().print(f"{event.time:%Y-%m-%d %H:%M:%S}  [bold]{kind}[/]  {event.reason or ''}{asked}")
    for line in shadow.lines(found):
        console().print(line)
    console().print(table(["metric", "difference>", "from>", "to>", "margin>"], intervals(found)))
    echo("\n".join(chart.drawn(found, metric or metric_of(found))))
    if png is not None:
        _draw(found, metric, png)


def report(
    rollout: Rollout,
    metric: Metric = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where; VERSION-PHASE.png here unless said.", metavar="FILE")
    ] = None,
    *,
    at: RegistryOptions,
) -> None:
    """A page about one rollout as a PNG: the confidence sequence, the metrics, and what was decided when.

    The registry writes one for each step by itself, under `registry/rollouts` of its data directory.
    """
    with at.open() as api:
        found = _get(api, rollout)
    path = out or Path(f"{found.version.replace('@', '-')}-{found.phase}.png")
    _draw(found, metric, path)
    console().print(f"written: {path}")


def _draw(found: RolloutState, metric: str | None, path: Path) -> None:
    from headrace.errors import UsageError
    from headrace_runtime.rollout_picture import metric_of, picture

    if not picture(found, metric or metric_of(found), path):
        raise UsageError("a picture needs matplotlib; install it")


def watch(
    rollout: Rollout,
    metric: Metric = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 2.0,
    *,
    at: RegistryOptions,
) -> None:
    """Draw the confidence sequence as it grows, until the rollout is over. Exit status 0 for a promotion, else 1.

    Where the output is no terminal, print a line whenever something has changed.
    """
    with at.open() as api:
        found = _get(api, rollout)
        last = _live(api, found, metric, every) if sys.stdout.isatty() else _lines(api, found, metric, every)
    if last.phase not in ("champion", "succeeded"):
        raise typer.Exit(1)


def begin(
    name: Name,
    version: VersionName,
    kind: Annotated[
        Literal["canary", "ab", "rolling"], typer.Option(help="Whether it may become champion, and by which way.")
    ] = "canary",
    share: Annotated[str | None, typer.Option(help="One fixed share, such as 1/20, in place of the stages.")] = None,
    reason: Reason = "",
    *,
    at: RegistryOptions,
) -> None:
    """Put a version up for a rollout: it passes the gate first, whatever `registry.rollout.kind` says."""
    from headrace.rollouts import Rollouts

    with at.open() as api:
        wanted = full_name(api, name, version)
        Rollouts(api).begin(name, wanted, kind=kind, share=share, reason=reason)
    console().print(f"{wanted} has its turn; follow it with [bold]headrace rollouts watch {name}[/]")


def stop(rollout: Rollout, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Hold: the version serves nobody any more, and nothing is said against it or its children."""
    _end(at, rollout, "stop", reason)


def promote(rollout: Rollout, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Make the version champion at once, past what its sessions have still to show."""
    _end(at, rollout, "promote", reason)


def rollback(rollout: Rollout, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Take the version back for good, with everything that descends from it."""
    _end(at, rollout, "roll_back", reason)


def _end(at: RegistryOptions, rollout: str, how: str, reason: str) -> None:
    from headrace.rollouts import Rollouts

    with at.open() as api:
        found = getattr(Rollouts(api), how)(_get(api, rollout).id, reason=reason)
    console().print(f"{found.version}: [bold]{found.phase.replace('_', ' ')}[/] {found.reason}")


def _get(api: ModelRegistry, wanted: str) -> RolloutState:
    """By its id, the first letters of it, or its model."""
    from headrace.errors import UsageError
    from headrace.rollouts import Rollouts

    rollouts = Rollouts(api)
    listed = rollouts.list(limit=_LIST_MAX)
    of_model = [one.id for one in listed if one.model == wanted][:1]
    found = of_model or [one.id for one in listed if one.id.startswith(wanted)]
    if len(found) != 1:
        many = f"{len(found)} rollouts begin" if found else "no model with rollouts is called, and no rollout begins,"
        raise UsageError(f"{wanted}: {many} like this; see `headrace rollouts list`")
    return rollouts.get(found[0])


def _lines(api: ModelRegistry, found: RolloutState, metric: str | None, every_s: float) -> RolloutState:
    from headrace.rollouts import Rollouts

    said = ""
    while True:
        line = in_a_line(found, metric)
        if line != said:
            echo(line)
            said = line
        if found.phase not in _UNDER_WAY:
            return found
        time.sleep(every_s)
        found = Rollouts(api).get(found.id)


def _live(api: ModelRegistry, found: RolloutState, metric: str | None, every_s: float) -> RolloutState:
    from rich.live import Live
    from rich.text import Text

    from headrace.rollouts import Rollouts
    from headrace_operations.rollouts import chart
    from headrace_runtime.rollout_picture import metric_of

    with Live(console=console(), auto_refresh=False) as screen:
        while True:
            drawn = chart.drawn(found, metric or metric_of(found), width=max(20, screen.console.width - 12))
            screen.update(Text("\n".join([in_a_line(found, metric), *drawn])), refresh=True)
            if found.phase not in _UNDER_WAY:
                return found
            time.sleep(every_s)
            found = Rollouts(api).get(found.id)


def in_a_line(found: RolloutState, metric: str | None) -> str:
    """Where it stands, for a log."""
    from headrace_runtime.rollout_picture import metric_of

    name = metric or metric_of(found)
    ends = [found.statistics.get(f"{name}.{part}") for part in ("difference", "lower", "upper")]
    known = [end for end in ends if end is not None]
    shown = "{:+.3f} in [{:+.3f}, {:+.3f}]".format(*known) if len(known) == len(ends) else "not read yet"
    arms = f"{found.statistics.get('candidate_units', 0):g}/{found.statistics.get('control_units', 0):g} units"
    met = f"  met by {found.statistics['exposure']:.1%}" if "exposure" in found.statistics else ""
    over = "" if found.phase in _UNDER_WAY else f"  {found.reason}"
    if found.phase == "shadow":
        arms = f"{found.statistics.get('shadow_units', 0):g}/{found.shadow_units} prompts"
    return f"{found.version}  {found.phase.replace('_', ' ')}  share {found.share}  {arms}  {name} {shown}{met}{over}"


def _row(one: RolloutState) -> tuple[str, ...]:
    numbers = one.statistics
    return (
        one.id,
        one.version,
        one.kind,
        one.phase.replace("_", " "),
        one.share,
        f"{numbers.get('candidate_units', 0):g}",
        f"{numbers.get('control_units', 0):g}",
        f"{one.watched_s:.0f} s",
        one.reason,
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
