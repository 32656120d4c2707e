"""`headrace models why` and `headrace sessions where`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import AsJson, BusOptions, Commands, command, console, echo_json, table

if TYPE_CHECKING:
    from headrace_operations.lineage.sessions import Where, Whereabouts
    from headrace_operations.lineage.versions import Why

Limit = Annotated[int, typer.Option(min=1, max=1000, help="Rows of a page.")]
After = Annotated[int, typer.Option(min=0, help="Pass over so many rows.")]


def why(
    version: Annotated[str, typer.Argument(help="MODEL@DIGEST.", metavar="VERSION")],
    whole: Annotated[
        bool, typer.Option("--all", help="All that its weights hold, not only what came since its parent.")
    ] = False,
    limit: Limit = 50,
    after: After = 0,
    *,
    at: BusOptions,
    json: AsJson = False,
) -> None:
    """What a version was trained on: batches, sessions, rewards and offsets, from topics alone."""
    import asyncio

    from headrace.topics import connected
    from headrace_operations.lineage.versions import why as ask

    async def read() -> Why:
        async with connected(at.address) as topics:
            return await ask(topics, version, whole=whole, after=after, limit=limit)

    found = asyncio.run(read())
    if json:
        _print_json(asdict_of(found))
    else:
        _print_why(found, after)


def where(
    session: Annotated[str, typer.Argument(help="As the client named it.", metavar="SESSION")],
    tenant: Annotated[str, typer.Option(help="Whose session it is.")] = "default",
    limit: Limit = 50,
    after: After = 0,
    *,
    at: BusOptions,
    json: AsJson = False,
) -> None:
    """Which experiences came of a session, and which versions were trained on them."""
    import asyncio

    from headrace.topics import connected
    from headrace_operations.lineage.sessions import where as ask

    async def read() -> Where:
        async with connected(at.address) as topics:
            return await ask(topics, session, tenant=tenant, after=after, limit=limit)

    found = asyncio.run(read())
    if json:
        _print_json(asdict_of(found))
    else:
        _print_where(found, after)


def asdict_of(found: Why | Where) -> dict[str, object]:
    """As JSON shows it; batches are values of an event."""
    made = asdict(found)
    if "batches" in made:
        made["batches"] = [batch.model_dump(mode="json") for batch in made["batches"]]
    return made


def _print_json(found: dict[str, object]) -> None:
    import json

    echo_json(json.dumps(found))


def _print_why(found: Why, after: int) -> None:
    out = console()
    since = "ever" if found.since_account < 0 else f"since its parent {found.parent}"
    out.print(
        f"[bold]{found.version}[/] of lineage {found.lineage}, save {found.account}: {found.total} revisions {since}"
    )
    if found.batches:
        steps = [batch.step for batch in found.batches]
        out.print(f"{len(steps)} batches, steps {min(steps)} to {max(steps)}")
    rows = [
        (
            one.session_id or "gone",
            f"{one.experience_id}#{one.revision}",
            _reward(one.reward),
            " ".join(f"{source}={value:g}" for source, value in one.parts.items()),
            "-" if one.offset is None else f"{one.partition}@{one.offset}",
            str(one.account),
        )
        for one in found.entries
    ]
    out.print(table(["session", "experience", "reward>", "from", "offset", "save>"], rows))
    _more(after, len(rows), found.total)


def _print_where(found: Where, after: int) -> None:
    out = console()
    for run in found.runs:
        out.print(f"run {run.trajectory_id}: {len(run.turn_ids)} turns" + (f", {run.held_out}" if run.held_out else ""))
        for turn_id, reason in run.left_out.items():
            out.print(f"  {turn_id} is in no experience: {reason}", markup=False)
    rows = [
        (
            f"{one.experience_id}#{one.revision}",
            _reward(one.reward) if one.no_reward is None else one.no_reward,
            f"{one.partition}@{one.offset}",
            _fates(one),
        )
        for one in found.entries
    ]
    out.print(table(["experience", "reward>", "offset", "what became of it"], rows, found.session_id))
    _more(after, len(rows), found.total)


def _fates(one: Whereabouts) -> str:
    words = []
    for fate in one.fates:
        what = f"{fate.outcome} {fate.reason}" if fate.reason else fate.outcome
        words.append(
            f"{fate.lineage}: {what} (save {fate.account}){f', first in {fate.version}' if fate.version else ''}"
        )
    return "; ".join(words) or "waits"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _more(after: int, shown: int, total: int) -> None:
    if after + shown < total:
        console().print(f"{shown} of {total}; the next page is --after {after + shown}")


sessions = typer.Typer(cls=Commands, no_args_is_help=True, help="What became of a session.")


def add_to(parent: typer.Typer, models: typer.Typer) -> None:
    command(models, why, "headrace models why email-agent@3f9c2d41aa07b6e5", "headrace models why VERSION --all --json")
    command(sessions, where, "headrace sessions where run-17", "headrace sessions where run-17 --tenant acme --json")
    parent.add_typer(sessions, name="sessions")
