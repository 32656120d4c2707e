"""`headrace models`: versions, aliases, promotion, rollback, pinning."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.figures import figure
from headrace_cli.commands import model_catalog, model_diff
from headrace_cli.commands.model_options import Name, Reason, RegistryOptions, VersionName, full_name
from headrace_cli.commands.shared import AsJson, Commands, command, console, echo_json, table

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas.registry_api import ModelState, VersionState


app = typer.Typer(cls=Commands, no_args_is_help=True, help="All models, their versions, and who serves.")


def list_models(*, at: RegistryOptions, json: AsJson = False) -> None:
    """Every model with its champion, the version before it, the candidate, and the best version so far.

    The best one is the anchor: no version that is `registry.gate.anchor_margin` worse takes over, however slowly it
    came to that. `trials` counts the versions that were compared with it.
    """
    with at.open() as api:
        found = api.models()
    if json:
        echo_json("[" + ", ".join(model.model_dump_json() for model in found) + "]")
        return
    rows = [_model_row(model) for model in found]
    columns = ["model", "champion", "previous", "candidate", "anchor", "trials>", "held", "routing>"]
    console().print(table(columns, rows))


def show(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many versions, the newest first.")] = 20,
    *,
    at: RegistryOptions,
    json: AsJson = False,
) -> None:
    """A model's versions with what was decided about them and why.

    The score comes from audit tasks, which chose nothing. The differences come from the gate tasks, which chose.
    """
    with at.open() as api:
        model, versions = api.model(name), api.versions(name, limit=limit)
    if json:
        echo_json("[" + ", ".join(version.model_dump_json() for version in versions) + "]")
        return
    rows = [_row(model, version) for version in versions]
    columns = ["version", "step>", "state", "audit score>", "gate tasks>", "vs champion", "vs anchor", "why"]
    console().print(table(columns, rows, name))
    if held(model) != "-":
        console().print(f"[yellow]{name} is {held(model)}: no candidate takes over by itself[/]")


def promote(
    name: Name,
    version: VersionName,
    force: Annotated[bool, typer.Option("--force", help="Skip the gate, never the probe.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the decision; exit status 1 when it is no.")] = False,
    timeout: Annotated[float, typer.Option(help="How many seconds to wait.", min=1)] = 900.0,
    *,
    at: RegistryOptions,
) -> None:
    """Put a version up for promotion: it is loaded, probed, played by the gate, and then takes over or is rejected."""
    with at.open() as api:
        full = full_name(api, name, version)
        before = len(_version(api, name, full).decisions)
        api.promote(name, full, force=force)
        if not wait:
            console().print(f"{full} has its turn; follow it with [bold]headrace models show {name}[/]")
            return
        with console().status(f"waiting for the decision about {full}"):
            state = _decided(api, name, full, before, timeout)
    reason = state.decisions[-1].reason or ""
    console().print(f"{full}: [bold]{state.state}[/] {reason}")
    if state.state != "promoted":
        raise typer.Exit(1)


def rollback(
    name: Name,
    reason: Reason = "",
    *,
    at: RegistryOptions,
) -> None:
    """Go back to the previous version at once; the present champion is withdrawn."""
    with at.open() as api:
        model = api.roll_back(name, reason=reason)
    console().print(f"{name}: the champion is [bold]{model.champion}[/] again")


def withdraw(
    name: Name,
    version: VersionName,
    reason: Reason = "",
    *,
    at: RegistryOptions,
) -> None:
    """Let no turn go to a version any more. For the champion, roll back instead."""
    with at.open() as api:
        full = full_name(api, name, version)
        api.withdraw(name, full, reason=reason)
    console().print(f"{full} is withdrawn")


def pin(
    name: Name,
    version: Annotated[
        str | None, typer.Argument(help="MODEL@DIGEST or its first letters; the champion if left out.")
    ] = None,
    reason: Reason = "",
    *,
    at: RegistryOptions,
) -> None:
    """Keep a version as champion, whatever is trained, until `unpin`. Another one than the champion is probed first."""
    with at.open() as api:
        model = api.pin(name, full_name(api, name, version) if version else None, reason=reason)
    console().print(f"{name} is pinned to [bold]{model.pinned or model.champion}[/]")


def unpin(name: Name, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Let candidates take over again."""
    with at.open() as api:
        api.unpin(name, reason=reason)
    console().print(f"{name} is not pinned: the next version that passes takes over")


def pause(name: Name, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Let new versions wait: none is probed, measured or promoted until `resume`. Training goes on."""
    with at.open() as api:
        api.pause(name, reason=reason)
    console().print(f"{name} is paused: new versions wait")


def stop(name: Name, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Stop what goes on by itself: a `pause`, and every rollout is held, so that the champion serves everybody.

    Nothing is said against the versions that were under way. The trainer goes on; what it publishes waits for `resume`.
    """
    with at.open() as api:
        champion = api.stop(name, reason=reason).champion
    console().print(f"{name} is stopped: {champion or 'nobody'} serves, and new versions wait for `resume`")


def resume(name: Name, reason: Reason = "", *, at: RegistryOptions) -> None:
    """Give those versions their turn that waited during a `pause`."""
    with at.open() as api:
        api.resume(name, reason=reason)
    console().print(f"{name} goes on: versions have their turn")


def held(model: ModelState) -> str:
    """What keeps candidates from taking over, in words."""
    words = [f"pinned to {model.pinned}"] if model.pinned else []
    return ", ".join([*words, *(["paused"] if model.paused else [])]) or "-"


def _version(api: ModelRegistry, name: str, version: str) -> VersionState:
    return next(one for one in api.versions(name, limit=1000) if one.id == version)


def _decided(api: ModelRegistry, name: str, version: str, before: int, timeout_s: float) -> VersionState:
    from headrace.errors import Unreachable

    deadline = time.monotonic() + timeout_s
    while True:
        state = _version(api, name, version)
        if state.state in ("promoted", "rejected", "withdrawn", "skipped") and len(state.decisions) > before:
            return state
        if time.monotonic() > deadline:
            raise Unreachable(f"{version} is still {state.state} after {timeout_s:g} s")
        time.sleep(0.5)


def _model_row(model: ModelState) -> tuple[str, ...]:
    roles = (model.champion, model.previous, model.candidate, model.anchor)
    return (model.id, *(role or "-" for role in roles), str(model.trials), held(model), str(model.revision))


def _row(model: ModelState, version: VersionState) -> tuple[str, ...]:
    roles = {
        model.anchor: "anchor",
        model.champion: "champion",
        model.previous: "previous",
        model.candidate: "candidate",
    }
    if model.anchor == model.previous != model.champion:
        roles[model.previous] = "previous, anchor"
    tried = _last(version, "promoted", "rejected")
    reasons = [event.reason for event in version.decisions if event.reason]
    words = [roles.get(version.id, version.state)]
    words += [word for word in ("served", "retired", "collected") if getattr(version, word)]
    return (
        f"{version.id} ({version.label})" if version.label else version.id,
        str(version.step),
        ", ".join(words),
        _number(_last(version, "evaluated"), "score", "score_standard_error", ".3f"),
        f"{tried['tasks']:.0f}" if "tasks" in tried else "-",
        _number(tried, "difference", "standard_error", "+.3f"),
        _number(tried, "anchor_difference", "anchor_standard_error", "+.3f"),
        reasons[-1] if reasons else "",
    )


def _last(version: VersionState, *decisions: str) -> dict[str, float]:
    """The numbers of the last of these decisions; none when there is none."""
    found = [event.statistics for event in version.decisions if event.decision in decisions]
    return found[-1] if found else {}


def _number(numbers: dict[str, float], name: str, error: str, form: str) -> str:
    return figure(numbers, name, error, form) if name in numbers else "-"


def add_to(parent: typer.Typer) -> None:
    command(app, list_models, "headrace models list", "headrace models list --json", name="list")
    command(app, show, "headrace models show email-agent", "headrace models show email-agent --limit 5")
    command(
        app,
        promote,
        "headrace models promote email-agent email-agent@3f9c2d --wait",
        "headrace models promote email-agent 3f9c2d --force   [dim]# past the gate, never past the probe[/]",
    )
    command(app, rollback, 'headrace models rollback email-agent --reason "complaints since Tuesday"')
    command(app, withdraw, "headrace models withdraw email-agent 3f9c2d")
    command(
        app, pin, "headrace models pin email-agent   [dim]# its champion[/]", "headrace models pin email-agent 3f9c2d"
    )
    command(app, unpin, "headrace models unpin email-agent")
    command(app, pause, 'headrace models pause email-agent --reason "a demonstration until Friday"')
    command(app, stop, 'headrace models stop email-agent --reason "an incident"')
    command(app, resume, "headrace models resume email-agent")
    model_catalog.add_to(app)
    model_diff.add_to(app)
    parent.add_typer(app, name="models")
