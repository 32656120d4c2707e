"""`headrace models`: versions, aliases, promotion, rollback, pinning, and the exchange with a model hub."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands import model_catalog, model_diff
from headrace_cli.commands.model_catalog import write_version
from headrace_cli.commands.model_options import Name, Reason, RegistryOptions, VersionName, full_name
from headrace_cli.commands.shared import AsJson, Commands, Config, DataDir, command, console, echo_json, folder, table

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas.http.registry_api import ModelState, VersionState

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Manage models, their versions, aliases and promotion.")
Hub = Annotated[str, typer.Argument(help="Model of the hub: ORG/NAME, or ORG/NAME@REVISION.", metavar="ORG/NAME")]
HubTarget = Annotated[str, typer.Argument(help="Model of the hub, which is created if missing.", metavar="ORG/NAME")]


def list_models(*, registry: RegistryOptions, json: AsJson = False) -> None:
    """List every model with its champion, the version before it, the candidate, and the anchor of the gate.

    The anchor is the last version shown to be better than the anchor before it: no version that is worse by
    `registry.gate.anchor_margin` takes over, even after many small losses. `trials` is the number of versions
    that were compared with it.
    """
    with registry.open() as api:
        models = api.models()
    if json:
        echo_json("[" + ", ".join(model.model_dump_json() for model in models) + "]")
        return
    rows = [_model_row(model) for model in models]
    columns = ["model", "champion", "previous", "candidate", "anchor", "trials>", "held", "routing>"]
    console().print(table(columns, rows))


def show(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of versions, newest first.")] = 20,
    *,
    registry: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Show the versions of a model with their decisions and reasons.

    The score comes from audit tasks, which take part in no decision. The differences come from the gate tasks.
    """
    with registry.open() as api:
        model, versions = api.model(name), api.versions(name, limit=limit)
    if json:
        echo_json("[" + ", ".join(version.model_dump_json() for version in versions) + "]")
        return
    rows = [_row(model, version) for version in versions]
    columns = ["version", "step>", "state", "audit score>", "gate tasks>", "vs champion", "vs anchor", "why"]
    console().print(table(columns, rows, name))
    if blocked_state(model) != "-":
        console().print(f"[yellow]{name} is {blocked_state(model)}: no candidate takes over by itself[/]")


def promote(
    name: Name,
    version: VersionName,
    force: Annotated[bool, typer.Option("--force", help="Skip the gate, but not the probe.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the decision; exit status 1 unless it is promoted.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Maximum waiting time in seconds.", min=1)] = 900.0,
    *,
    registry: RegistryOptions,
) -> None:
    """Request the promotion of a version: it is loaded, probed and evaluated, then it takes over or is rejected."""
    with registry.open() as api:
        full = full_name(api, name, version)
        decision_count = len(_version_state(api, name, full).decisions)
        api.promote(name, full, force=force)
        if not wait:
            console().print(f"{full} is a candidate now; follow it with [bold]headrace models show {name}[/]")
            return
        with console().status(f"waiting for the decision about {full}"):
            state = _wait_for_decision(api, name, full, decision_count, timeout)
    reason = state.decisions[-1].reason or ""
    console().print(f"{full}: [bold]{state.state}[/] {reason}")
    if state.state != "promoted":
        raise typer.Exit(1)


def rollback(
    name: Name,
    reason: Reason = "",
    *,
    registry: RegistryOptions,
) -> None:
    """Roll back to the previous version at once; the present champion is withdrawn."""
    with registry.open() as api:
        model = api.roll_back(name, reason=reason)
    console().print(f"{name}: the champion is [bold]{model.champion}[/] again")


def withdraw(
    name: Name,
    version: VersionName,
    reason: Reason = "",
    *,
    registry: RegistryOptions,
) -> None:
    """Withdraw a version, so that it gets no turns any more. Roll back to replace the champion."""
    with registry.open() as api:
        full = full_name(api, name, version)
        api.withdraw(name, full, reason=reason)
    console().print(f"{full} is withdrawn")


def pin(
    name: Name,
    version: Annotated[
        str | None,
        typer.Argument(help="Version, MODEL@DIGEST or the first characters of the digest; default: the champion."),
    ] = None,
    reason: Reason = "",
    *,
    registry: RegistryOptions,
) -> None:
    """Keep a version as champion until `unpin`, whatever is trained. A version that is not champion is probed first."""
    with registry.open() as api:
        model = api.pin(name, full_name(api, name, version) if version else None, reason=reason)
    console().print(f"{name} is pinned to [bold]{model.pinned or model.champion}[/]")


def unpin(name: Name, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Let candidates take over again."""
    with registry.open() as api:
        api.unpin(name, reason=reason)
    console().print(f"{name} is not pinned: the next version that passes the gate takes over")


def pause(name: Name, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Suspend probes, evaluations and promotions of new versions until `resume`. Training continues."""
    with registry.open() as api:
        api.pause(name, reason=reason)
    console().print(f"{name} is paused: new versions wait")


def stop(name: Name, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Stop all automatic changes: pause the model and hold every rollout, so that the champion serves all traffic.

    The held versions are not rejected. The trainer continues; the versions that it publishes wait for `resume`.
    """
    with registry.open() as api:
        champion = api.stop(name, reason=reason).champion
    console().print(f"{name} is stopped: {champion or 'no version'} serves, and new versions wait for `resume`")


def resume(name: Name, reason: Reason = "", *, registry: RegistryOptions) -> None:
    """Resume a paused model; versions that waited are probed and evaluated."""
    with registry.open() as api:
        api.resume(name, reason=reason)
    console().print(f"{name} is resumed: waiting versions are probed and evaluated")


def blocked_state(model: ModelState) -> str:
    """Return the reason why candidates cannot take over, or `-` if they can."""
    words = [f"pinned to {model.pinned}"] if model.pinned else []
    return ", ".join([*words, *(["paused"] if model.paused else [])]) or "-"


def _version_state(api: ModelRegistry, name: str, version: str) -> VersionState:
    return next(state for state in api.versions(name, limit=1000) if state.id == version)


def _wait_for_decision(
    api: ModelRegistry, name: str, version: str, decision_count: int, timeout_s: float
) -> VersionState:
    from headrace.errors import Unreachable

    deadline = time.monotonic() + timeout_s
    while True:
        state = _version_state(api, name, version)
        if state.state in ("promoted", "rejected", "withdrawn", "skipped") and len(state.decisions) > decision_count:
            return state
        if time.monotonic() > deadline:
            raise Unreachable(f"{version} is still {state.state} after {timeout_s:g} s")
        time.sleep(0.5)


def _model_row(model: ModelState) -> tuple[str, ...]:
    roles = (model.champion, model.previous, model.candidate, model.anchor)
    return (model.id, *(role or "-" for role in roles), str(model.trials), blocked_state(model), str(model.revision))


def _row(model: ModelState, version: VersionState) -> tuple[str, ...]:
    roles = {
        model.anchor: "anchor",
        model.champion: "champion",
        model.previous: "previous",
        model.candidate: "candidate",
    }
    if model.anchor == model.previous != model.champion:
        roles[model.previous] = "previous, anchor"
    trial = _last_statistics(version, "promoted", "rejected")
    reasons = [event.reason for event in version.decisions if event.reason]
    words = [roles.get(version.id, version.state)]
    words += [word for word in ("served", "retired", "collected") if getattr(version, word)]
    return (
        f"{version.id} ({version.label})" if version.label else version.id,
        str(version.step),
        ", ".join(words),
        _number(_last_statistics(version, "evaluated"), "score", "score_standard_error", ".3f"),
        f"{trial['tasks']:.0f}" if "tasks" in trial else "-",
        _number(trial, "difference", "standard_error", "+.3f"),
        _number(trial, "anchor_difference", "anchor_standard_error", "+.3f"),
        reasons[-1] if reasons else "",
    )


def _last_statistics(version: VersionState, *decisions: str) -> dict[str, float]:
    """Return the statistics of the version's last event with one of these decisions, or none if there is no such
    event.
    """
    statistics = [event.statistics for event in version.decisions if event.decision in decisions]
    return statistics[-1] if statistics else {}


def _number(numbers: dict[str, float], name: str, error: str, form: str) -> str:
    from headrace.following import format_number

    return format_number(numbers, name, error, form) if name in numbers else "-"


def add_to(parent: typer.Typer) -> None:
    command(app, list_models, "headrace models list", "headrace models list --json", name="list")
    command(app, show, "headrace models show email-agent", "headrace models show email-agent --limit 5")
    command(
        app,
        promote,
        "headrace models promote email-agent email-agent@3f9c2d --wait",
        "headrace models promote email-agent 3f9c2d --force   [dim]# skips the gate, but not the probe[/]",
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
    add_hub_commands(app)
    parent.add_typer(app, name="models")


def pull(model: Hub, data_dir: DataDir = None, config: Config = None) -> None:
    """Fetch a base model from the hub into the data directory, for `trainer.base`.

    The trainer does the same at its first start. Later starts use the commit that was fetched, without a connection; a
    new `pull` of a branch fetches its newest commit. HF_ENDPOINT and HF_TOKEN are honoured.
    """
    from headrace.errors import UsageError
    from headrace_runtime.storage import base_models

    repository = base_models.Repository.parse(model)
    if repository is None:
        raise UsageError(f"{model}: must be ORG/NAME or ORG/NAME@REVISION")
    remote = base_models.describe(repository)
    console().print(f"{repository} has {len(remote.files)} files, {remote.size / 1e6:,.1f} MB")
    target = base_models.fetch(remote, folder(data_dir, config))
    console().print(f"{repository} at commit {remote.commit} is in [bold]{target}[/]")
    console().print(f'train it with [bold]trainer.base = "{repository.name}@{remote.commit}"[/]')


def push(
    version: Annotated[str, typer.Argument(help="Version, MODEL@DIGEST or MODEL:LABEL.", metavar="VERSION")],
    target: HubTarget,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Create a public model; default: a private one.")] = False,
    config: Config = None,
    *,
    registry: RegistryOptions,
) -> None:
    """Upload a version to the hub, as `export` would write it. Needs HF_TOKEN; HF_ENDPOINT is honoured.

    `headrace models pull` fetches the same bytes, and `import` restores the same version from them.
    """
    import tempfile
    from pathlib import Path

    from headrace_operations import catalog

    with tempfile.TemporaryDirectory(prefix="headrace-push-") as scratch:
        path = Path(scratch) / "version"
        state = write_version(version, path, registry, merge=merge, config=config)
        with console().status(f"uploading {state.id} to {target}"):
            commit = catalog.push(path, target, message=state.id, private=not public)
    console().print(f"{state.id} is [bold]{target}@{commit}[/]")


def add_hub_commands(app: typer.Typer) -> None:
    command(
        app,
        pull,
        "headrace models pull Qwen/Qwen3-0.6B",
        "headrace models pull Qwen/Qwen3-0.6B@main --data-dir .headrace",
    )
    command(
        app,
        push,
        "headrace models push email-agent@3f9c2d my-org/email-agent",
        "headrace models push email-agent:v1.0 my-org/email-agent --merge --public",
    )
