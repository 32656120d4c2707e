"""`headrace models why` and `headrace sessions where`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import AsJson, BusOptions, Commands, command, console, echo_json, table

if TYPE_CHECKING:
    from headrace_operations.lineage.sessions import RevisionTrace, SessionTrace
    from headrace_operations.lineage.versions import VersionTrace

Limit = Annotated[int, typer.Option(min=1, max=1000, help="Number of rows of a page.")]
After = Annotated[int, typer.Option(min=0, help="Number of rows to skip.")]


def why(
    version: Annotated[str, typer.Argument(help="Version, MODEL@DIGEST.", metavar="VERSION")],
    everything: Annotated[
        bool, typer.Option("--all", help="Show everything that its weights contain, not only since its parent.")
    ] = False,
    limit: Limit = 50,
    after: After = 0,
    *,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """Show what a version was trained on: batches, sessions, rewards and offsets, from topics alone."""
    import asyncio

    from headrace.topics import connected
    from headrace_operations.lineage.versions import trace_version

    async def read() -> VersionTrace:
        async with connected(bus_options.address) as topics:
            return await trace_version(topics, version, everything=everything, after=after, limit=limit)

    trace = asyncio.run(read())
    if json:
        _print_json(_trace_as_dict(trace))
    else:
        _print_version_trace(trace, after)


def where(
    session: Annotated[str, typer.Argument(help="Session id of the client.", metavar="SESSION")],
    tenant: Annotated[str, typer.Option(help="Tenant of the session.")] = "default",
    limit: Limit = 50,
    after: After = 0,
    *,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """Show the experiences of a session and the versions that were trained on them."""
    import asyncio

    from headrace.topics import connected
    from headrace_operations.lineage.sessions import trace_session

    async def read() -> SessionTrace:
        async with connected(bus_options.address) as topics:
            return await trace_session(topics, session, tenant=tenant, after=after, limit=limit)

    trace = asyncio.run(read())
    if json:
        _print_json(_trace_as_dict(trace))
    else:
        _print_session_trace(trace, after)


def _trace_as_dict(trace: VersionTrace | SessionTrace) -> dict[str, object]:
    """Convert a trace to the fields of the JSON output."""
    fields = asdict(trace)
    if "batches" in fields:
        fields["batches"] = [batch.model_dump(mode="json") for batch in fields["batches"]]
    return fields


def _print_json(fields: dict[str, object]) -> None:
    import json

    echo_json(json.dumps(fields))


def _print_version_trace(trace: VersionTrace, after: int) -> None:
    out = console()
    since = "ever" if trace.since_account < 0 else f"since its parent {trace.parent}"
    out.print(
        f"[bold]{trace.version}[/] of lineage {trace.lineage}, save {trace.account}: {trace.total} revisions {since}"
    )
    if trace.batches:
        steps = [batch.step for batch in trace.batches]
        out.print(f"{len(steps)} batches, steps {min(steps)} to {max(steps)}")
    rows = [
        (
            entry.session_id or "deleted",
            f"{entry.experience_id}#{entry.revision}",
            _reward(entry.reward),
            " ".join(f"{source}={value:g}" for source, value in entry.parts.items()),
            "-" if entry.offset is None else f"{entry.partition}@{entry.offset}",
            str(entry.account),
        )
        for entry in trace.entries
    ]
    out.print(table(["session", "experience", "reward>", "from", "offset", "save>"], rows))
    _print_next_page(after, len(rows), trace.total)


def _print_session_trace(trace: SessionTrace, after: int) -> None:
    out = console()
    for run in trace.runs:
        out.print(f"run {run.trajectory_id}: {len(run.turn_ids)} turns" + (f", {run.held_out}" if run.held_out else ""))
        for turn_id, reason in run.left_out.items():
            out.print(f"  {turn_id} is in no experience: {reason}", markup=False)
    rows = [
        (
            f"{entry.experience_id}#{entry.revision}",
            _reward(entry.reward) if entry.no_reward is None else entry.no_reward,
            f"{entry.partition}@{entry.offset}",
            _statuses(entry),
        )
        for entry in trace.entries
    ]
    out.print(table(["experience", "reward>", "offset", "training"], rows, trace.session_id))
    _print_next_page(after, len(rows), trace.total)


def _statuses(revision: RevisionTrace) -> str:
    words = []
    for status in revision.fates:
        outcome = f"{status.outcome} {status.reason}" if status.reason else status.outcome
        version = f", first in {status.version}" if status.version else ""
        words.append(f"{status.lineage}: {outcome} (save {status.account}){version}")
    return "; ".join(words) or "waits"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _print_next_page(after: int, rows: int, total: int) -> None:
    if after + rows < total:
        console().print(f"{rows} of {total}; the next page is --after {after + rows}")


sessions = typer.Typer(cls=Commands, no_args_is_help=True, help="Trace sessions through training.")


def add_to(parent: typer.Typer, models: typer.Typer) -> None:
    command(models, why, "headrace models why email-agent@3f9c2d41aa07b6e5", "headrace models why VERSION --all --json")
    command(sessions, where, "headrace sessions where run-17", "headrace sessions where run-17 --tenant acme --json")
    parent.add_typer(sessions, name="sessions")
