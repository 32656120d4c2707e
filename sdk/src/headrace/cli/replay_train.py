"""`headrace replay plan | run | resume | offer | list | remove`: training again from what topics still hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli.shared import AsJson, Config, DataDir, command, console, running
from headrace.cli.times import parse_time

if TYPE_CHECKING:
    from headrace.replay.pouring import Tick
    from headrace.replay.report import Report
    from headrace.replay.request import Request

_DIFFERENT, _RANGE = "What is different", "What is replayed"
_CUTS = ("trainer.batch_", "trainer.group_", "trainer.advantage", "trainer.algorithm")
"""Settings that batches depend on: with one of them changed, the old cuts mean nothing."""
Name = Annotated[str, typer.Argument(help="A new name for the line of versions that comes of it.", metavar="LINEAGE")]
Known = Annotated[str, typer.Argument(help="The lineage that a replay leads into.", metavar="LINEAGE")]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        help="Score with this function instead; may be repeated.", metavar="FILE.py:NAME", rich_help_panel=_DIFFERENT
    ),
]
Rescore = Annotated[
    bool,
    typer.Option(
        "--rescore", help="Score again with the functions and weights of the settings.", rich_help_panel=_DIFFERENT
    ),
]
Judge = Annotated[
    bool,
    typer.Option(
        "--judge", help="Have the judge of the settings judge again, then score again.", rich_help_panel=_DIFFERENT
    ),
]


def _announced(algorithm: str | None) -> str | None:
    """Whatever an installed package announces; the trainer's own say so in the same way."""
    from headrace_runtime.registries import PluginError, Registry

    try:
        if algorithm is not None:
            Registry("algorithms", object, "algorithm").point(algorithm)
    except PluginError as error:
        raise typer.BadParameter(str(error)) from None
    return algorithm


AlgorithmOption = Annotated[
    str | None,
    typer.Option(help="Train with this algorithm instead.", callback=_announced, rich_help_panel=_DIFFERENT),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Another setting for the replay; may be repeated.",
        metavar="SECTION.KEY=VALUE",
        rich_help_panel=_DIFFERENT,
    ),
]
Of = Annotated[
    str | None,
    typer.Option(help="The lineage to train again; default: the live one.", metavar="LINEAGE", rich_help_panel=_RANGE),
]
CutOption = Annotated[
    Literal["auto", "recorded", "rules"],
    typer.Option(
        help="Cut batches where they once were, or by the settings; auto: the first when nothing changes.",
        rich_help_panel=_DIFFERENT,
    ),
]
Since = Annotated[
    str | None, typer.Option(help="From this time on: ISO 8601, or 90s, 5min, 2h, 7d ago.", rich_help_panel=_RANGE)
]
Until = Annotated[str | None, typer.Option(help="Up to this time, exclusive.", rich_help_panel=_RANGE)]
FromOffset = Annotated[
    int | None, typer.Option(min=0, help="From this offset of each partition on.", rich_help_panel=_RANGE)
]
ToOffset = Annotated[int | None, typer.Option(min=0, help="Up to this offset, exclusive.", rich_help_panel=_RANGE)]
Partition = Annotated[
    list[int] | None, typer.Option(help="Only this partition; may be repeated.", rich_help_panel=_RANGE)
]
Session = Annotated[
    list[str] | None, typer.Option(help="Only this session; may be repeated.", metavar="ID", rich_help_panel=_RANGE)
]
Tenant = Annotated[str, typer.Option(help="Whose sessions they are.", rich_help_panel=_RANGE)]
VersionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--version",
        help="Only what this version took part in; may be repeated.",
        metavar="NAME@DIGEST",
        rich_help_panel=_RANGE,
    ),
]
BusOption = Annotated[str | None, typer.Option(help="The bus, when `up` does not run here.", metavar="HOST:PORT")]


def plan(
    lineage: Name = "replayed",
    rewards: Rewards = None,
    rescore: Rescore = False,
    judge: Judge = False,
    algorithm: AlgorithmOption = None,
    settings: Set = None,
    of: Of = None,
    cut: CutOption = "auto",
    since: Since = None,
    until: Until = None,
    from_offset: FromOffset = None,
    to_offset: ToOffset = None,
    partition: Partition = None,
    session: Session = None,
    tenant: Tenant = "default",
    version: VersionOption = None,
    config: Config = None,
    bus: BusOption = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Say what `replay run` with the same options would do, and do nothing.

    Counts what is there by kind and version, scores it if it is to be scored, and rehearses training without a model:
    what would be trained, what would be dropped and why, and whether the batches are the original ones, byte for byte.
    """
    from headrace.replay import conduct

    request = _request(**locals())
    _conduct(lambda tick: conduct.plan(request, tick), json, planned=True)


def run(
    lineage: Name,
    rewards: Rewards = None,
    rescore: Rescore = False,
    judge: Judge = False,
    algorithm: AlgorithmOption = None,
    settings: Set = None,
    of: Of = None,
    cut: CutOption = "auto",
    since: Since = None,
    until: Until = None,
    from_offset: FromOffset = None,
    to_offset: ToOffset = None,
    partition: Partition = None,
    session: Session = None,
    tenant: Tenant = "default",
    version: VersionOption = None,
    config: Config = None,
    bus: BusOption = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Train a new lineage from stored experiences, or from stored trajectories with another reward.

    With --rewards, --rescore or --judge the range is one of the topic trajectories, else of experiences. Everything
    happens beside what runs: no consumer group of a service is used, what is written goes to topics of the replay's
    own, and the versions serve nobody before they are offered.
    """
    from headrace.replay import conduct

    request = _request(**locals())
    _conduct(lambda tick: conduct.run(request, tick), json)


def resume(
    lineage: Known,
    settings: Set = None,
    config: Config = None,
    bus: BusOption = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Go on with a replay whose training was interrupted, from its last saved state.

    Name the same settings as for `run`.
    """
    from headrace.replay import conduct

    request = _request(lineage, settings=settings, config=config, bus=bus, data_dir=data_dir)
    _conduct(lambda tick: conduct.resume(request, tick), json)


def offer(
    lineage: Known,
    version: Annotated[str | None, typer.Option(help="Not the last one, but this.", metavar="NAME@DIGEST")] = None,
    bus: BusOption = None,
    data_dir: DataDir = None,
) -> None:
    """Hand a replayed version to the registry, which probes it, plays the gate, and promotes it or not.

    See what became of it with `headrace models show`.
    """
    import asyncio

    from headrace.replay.offering import offer as announce

    chosen = asyncio.run(announce(_bus(bus, data_dir), lineage, version))
    console().print(f"{chosen.version} is announced; `headrace models show {chosen.model}` tells what becomes of it")


def list_(bus: BusOption = None, data_dir: DataDir = None) -> None:
    """List the lineages that replays on this bus lead into."""
    import asyncio

    from headrace.replay.copying import lineages

    for name in asyncio.run(lineages(_bus(bus, data_dir))):
        typer.echo(name)


def remove(lineage: Known, bus: BusOption = None, data_dir: DataDir = None) -> None:
    """Delete the topics of a replay. Its versions stay in the blob store."""
    import asyncio

    from headrace.replay.copying import remove as delete

    for name in asyncio.run(delete(_bus(bus, data_dir), lineage)):
        console().print(f"deleted {name}")


def _bus(given: str | None, data_dir: Path | None) -> str:
    """The one that was named, that of the environment's settings, or that of what runs here."""
    import os

    from headrace.supervisor.overrides import Overrides

    return given or str(Overrides(None, {}, os.environ).get("bus.address") or "") or running(data_dir).bus


def _request(
    lineage: str,
    rewards: list[str] | None = None,
    rescore: bool = False,
    judge: bool = False,
    algorithm: str | None = None,
    settings: list[str] | None = None,
    of: str | None = None,
    cut: Literal["auto", "recorded", "rules"] = "auto",
    since: str | None = None,
    until: str | None = None,
    from_offset: int | None = None,
    to_offset: int | None = None,
    partition: list[int] | None = None,
    session: list[str] | None = None,
    tenant: str = "default",
    version: list[str] | None = None,
    config: Path | None = None,
    bus: str | None = None,
    data_dir: Path | None = None,
    **_: object,
) -> Request:
    """The options of a command (its `locals()`) as a request. Settings of the command line win over the file's."""
    import os

    from headrace.replay.request import make
    from headrace.supervisor.overrides import Overrides, parse_assignments
    from headrace.topics import Range
    from headrace_schemas.ids import session_key

    changed = parse_assignments(settings or [])
    overrides = Overrides(config, changed, os.environ)
    if data_dir is not None:
        overrides.set("data_dir", data_dir.absolute())
    if rewards:
        overrides.set("scorer.functions", rewards)
    if algorithm:
        overrides.set("trainer.algorithm", algorithm)
        for kind in ("trainer.advantage.kind", "trainer.loss.kind"):
            overrides.set(kind, "")  # what a file says of them was for another algorithm
    wanted = Range(
        "trajectories" if rewards or rescore or judge else "experiences",
        partitions=tuple(partition or ()),
        from_offset=from_offset,
        to_offset=to_offset,
        since=parse_time(since),
        until=parse_time(until),
        keys=frozenset(session_key(tenant, one) for one in session or ()),
    )
    address = bus or str(overrides.get("bus.address") or "") or running(data_dir).bus
    if cut == "auto" and (algorithm or any(name.startswith(_CUTS) for name in changed)):
        cut = "rules"
    return make(lineage, wanted, overrides, address, of=of, versions=frozenset(version or ()), judge=judge, cut=cut)


def _conduct(work: Callable[[Tick], Awaitable[Report]], json: bool, *, planned: bool = False) -> None:
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from headrace.cli.replay_report import as_json, show

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    async def done(tick: Tick) -> Report:
        return await work(tick)

    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the journal", total=None)

        def tick(what: str, now: int, total: int) -> None:
            bar.update(task, description=what, completed=now, total=total or None)

        report = asyncio.run(done(tick))
    if json:
        typer.echo(as_json(report))
    else:
        show(report, planned=planned)


def add_to(app: typer.Typer) -> None:
    command(
        app,
        plan,
        "headrace replay plan --config headrace.toml",
        "headrace replay plan --rewards rewards.py:strict --since 7d",
        "headrace replay plan --algorithm grpo --set trainer.group_size=4",
    )
    command(
        app,
        run,
        "headrace replay run again --config headrace.toml",
        "headrace replay run strict --rewards rewards.py:strict --since 2026-01-01",
        "headrace replay run judged --judge --set 'judge.endpoint.model=\"a-better-judge\"'",
        "headrace replay run grouped --algorithm grpo --set trainer.group_size=4 --version support@0123456789abcdef",
    )
    command(app, resume, "headrace replay resume strict --config headrace.toml")
    command(
        app, offer, "headrace replay offer strict", "headrace replay offer strict --version support@0123456789abcdef"
    )
    command(app, list_, "headrace replay list", name="list")
    command(app, remove, "headrace replay remove strict")
