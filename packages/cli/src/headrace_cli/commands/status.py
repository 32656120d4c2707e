"""`headrace status`."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.shared import (
    AsJson,
    DataDir,
    InternalKey,
    command,
    console,
    echo_json,
    folder,
    format_state,
    load_stack_token,
    progress,
    running_state,
    table,
)

if TYPE_CHECKING:
    from headrace_operations.guard import Finding
    from headrace_operations.supervisor import RunState
    from headrace_operations.turn_account import TurnAccount
    from headrace_schemas.http.registry_api import ModelState, SourceState

_SUSPENDED_S = 10.0
"""The supervisor checks every second; after this time without a check its state file is out of date."""


def status(
    account: Annotated[bool, typer.Option(help="Read the topics and account for every turn.")] = True,
    lineage: Annotated[
        list[str] | None,
        typer.Option(help="Count this lineage instead of the last one; may be repeated.", metavar="MODEL=LINEAGE"),
    ] = None,
    key: InternalKey = None,
    bus: Annotated[
        str | None, typer.Option(help="Account for the turns of this bus; no service must run here.")
    ] = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Show running services, serving versions and the account of all turns: trained, waiting, or dropped with reason.

    The account is computed from the topics alone. Exit status 1 if it has contradictions. A message warns if the
    training reward rises while the audit score falls, and if the audit score is flat.
    """
    from rich.markup import escape

    from headrace_operations.supervisor import state as run_state

    if bus:
        load_stack_token(data_dir)
    state, alive = (None, {}) if bus else run_state.check_health(running_state(data_dir))
    sources = run_state.sources(state, alive, key) if state else ()
    models = _models(state, key) if state else ()
    address = bus or (state.bus if state else "")
    turn_account = _account(address, lineage or []) if account else None
    learning = _reward_findings(address) if account else ()
    if json:
        echo_json(jsonlib.dumps(_as_json(state, models, turn_account, alive, sources, learning), indent=1))
    else:
        if state is not None:
            _print_suspended(state, data_dir)
        _print_unserved(models)
        _print(state, models, turn_account, alive)
        _print_sources(sources)
        for finding in learning:
            console().print(f"[yellow]{escape(finding.text)}[/]")
    if turn_account is not None and not turn_account.consistent:
        raise typer.Exit(1)


def _models(state: RunState, key: str | None) -> tuple[ModelState, ...]:
    from headrace.errors import HeadraceError, Retries
    from headrace.registry import ModelRegistry

    service = state.services.get("registry")
    if service is None or service.status != "ready":
        return ()
    try:
        with ModelRegistry(service.url, key=key, timeout_s=5, retries=Retries(attempts=1)) as registry:
            return registry.models()
    except HeadraceError as error:
        console(stderr=True).print(f"[yellow]the registry did not list its models: {error}[/]")
        return ()


def _account(bus: str, lineage: list[str]) -> TurnAccount:
    import asyncio

    from headrace.errors import UsageError
    from headrace_operations.from_topics import read_turn_account

    lineages = dict(entry.partition("=")[::2] for entry in lineage)
    if "" in lineages.values():
        raise UsageError("--lineage: the form is MODEL=LINEAGE")
    with progress("reading topics") as tick:
        return asyncio.run(read_turn_account(bus, lineages, lambda read, total: tick("reading topics", read, total)))


def _reward_findings(bus: str) -> tuple[Finding, ...]:
    import asyncio

    from headrace_operations.from_topics import read_findings

    return asyncio.run(read_findings(bus))


def _print_suspended(state: RunState, data_dir: DataDir) -> None:
    from headrace_operations.supervisor.state import supervisor_silence_s

    silent_s = supervisor_silence_s(folder(data_dir))
    if silent_s > _SUSPENDED_S:
        console().print(
            f"[red]the supervisor (pid {state.pid}) has not checked for {_format_duration(silent_s)}: it is suspended "
            "or stuck. States are its last ones, no service is restarted, and only `alive` is up to date[/]"
        )


def _print_unserved(models: tuple[ModelState, ...]) -> None:
    """Print models that no replica serves first, with the reason that the replica reported."""
    for model in models:
        if model.trouble is not None:
            console().print(f"[red]model {model.id} is not served:[/]", end=" ")
            console().print(model.trouble, markup=False)


def _print_sources(sources: tuple[SourceState, ...]) -> None:
    """Print the reward sources whose last calls failed, with their last error."""
    failing = [source for source in sources if source.failing]
    for source in failing:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(source.outcomes.items()))
        console().print(
            f"[red]{source.id} fails[/] ({source.failing} times in a row; {counts}), the last error:", end=" "
        )
        console().print(source.last_error or "", markup=False)


def _print(
    state: RunState | None, models: tuple[ModelState, ...], account: TurnAccount | None, alive: dict[str, str]
) -> None:
    out = console()
    if state is not None:
        now = datetime.now(UTC)
        rows = [
            (name, format_state(service), _format_alive(alive.get(name, "-")), service.url, str(service.pid or "-"),
             str(service.restarts), _format_duration((now - service.since).total_seconds()))
            for name, service in state.services.items()
        ]  # fmt: skip
        out.print(table(["service", "state", "alive", "address", "pid>", "restarts>", "for>"], rows))
        out.print(f"bus {state.bus}   base_url {state.base_url or '-'}   data {state.data_dir}")
    if models:
        roles = [(model.id, model.champion or "-", model.previous or "-", model.candidate or "-") for model in models]
        out.print(table(["model", "champion", "previous", "candidate"], roles))
    if account is not None:
        _print_account(account)


def _print_account(account: TurnAccount) -> None:
    out = console()
    rows = [("captured", "", str(account.captured)), ("trained", "", str(account.trained))]
    rows += [("waiting", f"for {event}", str(count)) for event, count in account.waiting.items()]
    rows += [("dropped", reason, str(count)) for reason, count in account.dropped.items()]
    names = ", ".join(f"{model} in lineage {lineage}" for model, lineage in account.lineages.items())
    out.print(table(["turns", "", "count>"], rows, f"account {f'({names})' if names else ''}".strip()))
    if account.untaught:
        untaught = [(reason, str(count)) for reason, count in account.untaught.items()]
        out.print(table(["feedback that trains nothing", "count>"], untaught))
    if account.tokens:
        out.print(table(["sampled tokens", "count>"], [(kind, str(count)) for kind, count in account.tokens.items()]))
    if account.consistent:
        out.print("[green]it adds up[/]")
        return
    out.print(f"[red]it does not add up: {account.problems_total} problems[/]")
    for problem in account.problems[:20]:
        out.print(f"  {problem}", markup=False)


def _format_alive(answer: str) -> str:
    return answer if answer in ("yes", "-") else f"[red]{answer}[/]"


def _format_duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _as_json(
    state: RunState | None,
    models: tuple[ModelState, ...],
    account: TurnAccount | None,
    alive: dict[str, str],
    sources: tuple[SourceState, ...],
    learning: tuple[Finding, ...],
) -> dict[str, Any]:
    return {
        "run": state.model_dump(mode="json") if state else None,
        "alive": alive,
        "sources": [source.model_dump(mode="json", exclude_none=True) for source in sources],
        "models": [model.model_dump(mode="json") for model in models],
        "account": asdict(account) if account else None,
        "learning": [asdict(finding) for finding in learning],
    }


def add_to(app: typer.Typer) -> None:
    command(app, status, "headrace status", "headrace status --no-account", "headrace status --bus kafka:9092 --json")
