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
    condition,
    console,
    echo_json,
    folder,
    know_stack,
    progress,
    running,
    table,
)

if TYPE_CHECKING:
    from headrace_operations.guard import Finding
    from headrace_operations.supervisor import RunState
    from headrace_operations.turn_account import TurnAccount
    from headrace_schemas.registry_api import ModelState
    from headrace_schemas.source_api import SourceState

_UNWATCHED_S = 10.0
"""A supervisor looks every second; after so long without a look what it wrote is not believed."""


def status(
    account: Annotated[bool, typer.Option(help="Read the topics and account for every turn.")] = True,
    lineage: Annotated[
        list[str] | None,
        typer.Option(help="Account for this lineage instead of the last one.", metavar="MODEL=LINEAGE"),
    ] = None,
    key: InternalKey = None,
    bus: Annotated[str | None, typer.Option(help="Account for this bus; nothing needs to run here.")] = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """What runs and answers, who serves, and what became of every captured turn: trained, waiting, or dropped and why.

    The account is computed from the topics alone. Exit status 1 when it does not add up. When the training reward rises
    while the audit score falls, or the score has gone flat, a sentence says so and what to try.
    """
    from rich.markup import escape

    from headrace_operations import service_health

    if bus:
        know_stack(data_dir)
    state, alive = (None, {}) if bus else service_health.asked(running(data_dir))
    sources = service_health.sources(state, alive, key) if state else ()
    models = _models(state, key) if state else ()
    address = bus or (state.bus if state else "")
    found = _account(address, lineage or []) if account else None
    learning = _learning(address) if account else ()
    if json:
        echo_json(jsonlib.dumps(_as_json(state, models, found, alive, sources, learning), indent=1))
    else:
        if state is not None:
            _print_unwatched(state, data_dir)
        _print_unserved(models)
        _print(state, models, found, alive)
        _print_sources(sources)
        for one in learning:
            console().print(f"[yellow]{escape(one.text)}[/]")
    if found is not None and not found.consistent:
        raise typer.Exit(1)


def _models(state: RunState, key: str | None) -> tuple[ModelState, ...]:
    from headrace.errors import HeadraceError
    from headrace.registry import ModelRegistry
    from headrace.retries import Retries

    service = state.services.get("registry")
    if service is None or service.status != "ready":
        return ()
    try:
        with ModelRegistry(service.url, key=key, timeout_s=5, retries=Retries(attempts=1)) as registry:
            return registry.models()
    except HeadraceError as error:
        console(stderr=True).print(f"[yellow]the registry does not say who serves: {error}[/]")
        return ()


def _account(bus: str, lineage: list[str]) -> TurnAccount:
    import asyncio

    from headrace.errors import UsageError
    from headrace_operations.from_topics import read_turn_account

    named = dict(one.partition("=")[::2] for one in lineage)
    if "" in named.values():
        raise UsageError("--lineage: write MODEL=LINEAGE")
    with progress("reading topics") as tick:
        return asyncio.run(read_turn_account(bus, named, lambda read, total: tick("reading topics", read, total)))


def _learning(bus: str) -> tuple[Finding, ...]:
    import asyncio

    from headrace_operations.from_topics import findings_of

    return asyncio.run(findings_of(bus))


def _print_unwatched(state: RunState, data_dir: DataDir) -> None:
    from headrace_operations.supervisor.state import unwatched_s

    silent_s = unwatched_s(folder(data_dir))
    if silent_s > _UNWATCHED_S:
        console().print(
            f"[red]the supervisor (pid {state.pid}) has not looked for {_age(silent_s)}: it is stopped or stuck. "
            "States are what it saw last, nobody restarts what ends, and only `alive` is true now[/]"
        )


def _print_unserved(models: tuple[ModelState, ...]) -> None:
    """Print first what stops users: models that no replica serves, with the reason that the replica reported."""
    for model in models:
        if model.trouble is not None:
            console().print(f"[red]model {model.id} is not served:[/]", end=" ")
            console().print(model.trouble, markup=False)


def _print_sources(sources: tuple[SourceState, ...]) -> None:
    """Those that have just failed, with the last error."""
    failing = [source for source in sources if source.failing]
    for source in failing:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(source.outcomes.items()))
        console().print(f"[red]{source.id} fails[/] ({source.failing} in a row; {counts}), the last error:", end=" ")
        console().print(source.last_error or "", markup=False)


def _print(
    state: RunState | None, models: tuple[ModelState, ...], account: TurnAccount | None, alive: dict[str, str]
) -> None:
    out = console()
    if state is not None:
        now = datetime.now(UTC)
        rows = [
            (name, condition(one), _alive(alive.get(name, "-")), one.url, str(one.pid or "-"),
             str(one.restarts), _age((now - one.since).total_seconds()))
            for name, one in state.services.items()
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
    rows += [("waiting", f"for {what}", str(count)) for what, count in account.waiting.items()]
    rows += [("dropped", reason, str(count)) for reason, count in account.dropped.items()]
    names = ", ".join(f"{model} in lineage {lineage}" for model, lineage in account.lineages.items())
    out.print(table(["turns", "", "count>"], rows, f"account {f'({names})' if names else ''}".strip()))
    if account.untaught:
        untaught = [(reason, str(count)) for reason, count in account.untaught.items()]
        out.print(table(["feedback about turns that cannot be trained", "count>"], untaught))
    if account.consistent:
        out.print("[green]it adds up[/]")
        return
    out.print(f"[red]it does not add up: {account.problems_total} problems[/]")
    for problem in account.problems[:20]:
        out.print(f"  {problem}", markup=False)


def _alive(answer: str) -> str:
    return answer if answer in ("yes", "-") else f"[red]{answer}[/]"


def _age(seconds: float) -> str:
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
        "learning": [asdict(one) for one in learning],
    }


def add_to(app: typer.Typer) -> None:
    command(app, status, "headrace status", "headrace status --no-account", "headrace status --bus kafka:9092 --json")
