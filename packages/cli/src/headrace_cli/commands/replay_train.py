"""`headrace replay plan | run | resume | offer | list | remove`: training again from what topics still hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace_cli.commands.ranges import PANEL, RangeOptions
from headrace_cli.commands.shared import (
    AsJson,
    BusAddress,
    Config,
    DataDir,
    command,
    console,
    echo,
    echo_json,
    progress,
    running,
)

if TYPE_CHECKING:
    from headrace_operations.replay.pipeline import Tick
    from headrace_operations.replay.report import Report
    from headrace_operations.replay.request import Request
    from headrace_operations.supervisor.overrides import Overrides

_DIFFERENT = "What is different"
_CUTS = ("trainer.batch_", "trainer.group_", "trainer.pair_", "trainer.advantage", "trainer.algorithm")
"""Settings that batches depend on: with one of them changed, the old cuts mean nothing."""
Name = Annotated[str, typer.Argument(help="A new name for the line of versions that comes of it.", metavar="LINEAGE")]
Known = Annotated[str, typer.Argument(help="The lineage that a replay leads into.", metavar="LINEAGE")]
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


def _announced(algorithm: str | None) -> str | None:
    """Whatever an installed package announces; the trainer's own say so in the same way."""
    from headrace_runtime.registries import PluginError, Registry

    try:
        if algorithm is not None:
            Registry("algorithms", object, "algorithm").point(algorithm)
    except PluginError as error:
        raise typer.BadParameter(str(error)) from None
    return algorithm


@dataclass(frozen=True)
class Changes:
    """What is to be different from the first training."""

    rewards: Annotated[
        list[str] | None,
        typer.Option(
            help="Score with this function instead; may be repeated.",
            metavar="FILE.py:NAME",
            rich_help_panel=_DIFFERENT,
        ),
    ] = None
    rescore: Annotated[
        bool,
        typer.Option(
            "--rescore", help="Score again with the functions and weights of the settings.", rich_help_panel=_DIFFERENT
        ),
    ] = False
    judge: Annotated[
        bool,
        typer.Option(
            "--judge", help="Have the judge of the settings judge again, then score again.", rich_help_panel=_DIFFERENT
        ),
    ] = False
    algorithm: Annotated[
        str | None,
        typer.Option(help="Train with this algorithm instead.", callback=_announced, rich_help_panel=_DIFFERENT),
    ] = None
    settings: Set = None
    of: Annotated[
        str | None,
        typer.Option(
            help="The lineage to train again; default: the live one.", metavar="LINEAGE", rich_help_panel=PANEL
        ),
    ] = None
    cut: Annotated[
        Literal["auto", "recorded", "rules"],
        typer.Option(
            help="Cut batches where they once were, or by the settings; auto: the first when nothing changes.",
            rich_help_panel=_DIFFERENT,
        ),
    ] = "auto"

    @property
    def topic(self) -> str:
        """Where the replay begins: where rewards are made again, with trajectories."""
        return "trajectories" if self.rewards or self.rescore or self.judge else "experiences"


@dataclass(frozen=True)
class ReplayRange(RangeOptions):
    """A range of a topic, or of it only what a version took part in."""

    version: Annotated[
        list[str] | None,
        typer.Option(
            "--version",
            help="Only what this version took part in; may be repeated.",
            metavar="NAME@DIGEST",
            rich_help_panel=PANEL,
        ),
    ] = None


@dataclass(frozen=True)
class SettingsOptions:
    """Where it happens: settings, the bus and the data directory."""

    config: Config = None
    bus: BusAddress = None
    data_dir: DataDir = None

    def address(self, overrides: Overrides) -> str:
        """The bus that was named, that of the settings, or that of what runs here."""
        return self.bus or str(overrides.get("bus.address") or "") or running(self.data_dir).bus


@dataclass(frozen=True)
class ReplayBus:
    """The bus alone: the one that was named, that of the environment's settings, or that of what runs here."""

    bus: BusAddress = None
    data_dir: DataDir = None

    @property
    def address(self) -> str:
        import os

        from headrace_operations.supervisor.overrides import Overrides

        return SettingsOptions(None, self.bus, self.data_dir).address(Overrides(None, {}, os.environ))


def plan(
    lineage: Name = "replayed", *, changes: Changes, chosen: ReplayRange, place: SettingsOptions, json: AsJson = False
) -> None:
    """Say what `replay run` with the same options would do, and do nothing.

    Counts what is there by kind and version, scores it if it is to be scored, and makes a dry run of training without
    a model: what would be trained, what would be dropped and why, and whether the batches are the original ones, byte
    for byte.
    """
    from headrace_operations.replay import runner

    request = _request(lineage, changes, chosen, place)
    _shown(lambda tick: runner.plan(request, tick), json, planned=True)


def run(lineage: Name, *, changes: Changes, chosen: ReplayRange, place: SettingsOptions, json: AsJson = False) -> None:
    """Train a new lineage from stored experiences, or from stored trajectories with another reward.

    With --rewards, --rescore or --judge the range is one of the topic trajectories, else of experiences. Everything
    happens beside what runs: no consumer group of a service is used, what is written goes to topics of the replay's
    own, and the versions serve nobody before they are offered.
    """
    from headrace_operations.replay import runner

    request = _request(lineage, changes, chosen, place)
    _shown(lambda tick: runner.run(request, tick), json)


def resume(
    lineage: Known,
    *,
    settings: Set = None,
    place: SettingsOptions,
    json: AsJson = False,
) -> None:
    """Go on with a replay whose training was interrupted, from its last saved state.

    Name the same settings as for `run`.
    """
    from headrace_operations.replay import runner

    request = _request(lineage, Changes(settings=settings), ReplayRange(), place)
    _shown(lambda tick: runner.resume(request, tick), json)


def offer(
    lineage: Known,
    version: Annotated[str | None, typer.Option(help="Not the last one, but this.", metavar="NAME@DIGEST")] = None,
    *,
    place: ReplayBus,
) -> None:
    """Hand a replayed version to the registry, which probes it, plays the gate, and promotes it or not.

    See what became of it with `headrace models show`.
    """
    import asyncio

    from headrace_operations.replay.offering import offer as announce

    chosen = asyncio.run(announce(place.address, lineage, version))
    console().print(f"{chosen.version} is announced; `headrace models show {chosen.model}` tells what becomes of it")


def list_(*, place: ReplayBus) -> None:
    """List the lineages that replays on this bus lead into."""
    import asyncio

    from headrace_operations.replay.copying import lineages

    for name in asyncio.run(lineages(place.address)):
        echo(name)


def remove(lineage: Known, *, place: ReplayBus) -> None:
    """Delete the topics of a replay. Its versions stay in the blob store."""
    import asyncio

    from headrace_operations.replay.copying import remove as delete

    for name in asyncio.run(delete(place.address, lineage)):
        console().print(f"deleted {name}")


def _request(lineage: str, changes: Changes, chosen: ReplayRange, place: SettingsOptions) -> Request:
    """The options of a command as a request. Settings of the command line win over the file's."""
    import os

    from headrace_operations.replay.request import make
    from headrace_operations.supervisor.overrides import Overrides, parse_assignments

    changed = parse_assignments(changes.settings or [])
    overrides = Overrides(place.config, changed, os.environ)
    if place.data_dir is not None:
        overrides.set("data_dir", place.data_dir.absolute())
    if changes.rewards:
        overrides.set("scorer.functions", changes.rewards)
    if changes.algorithm:
        overrides.set("trainer.algorithm", changes.algorithm)
        for kind in ("trainer.advantage.kind", "trainer.loss.kind"):
            overrides.set(kind, "")  # what a file says of them was for another algorithm
    moved = changes.algorithm or any(name.startswith(_CUTS) for name in changed)
    return make(
        lineage,
        chosen.of(changes.topic),
        overrides,
        place.address(overrides),
        of=changes.of,
        versions=frozenset(chosen.version or ()),
        judge=changes.judge,
        cut="rules" if changes.cut == "auto" and moved else changes.cut,
    )


def _shown(work: Callable[[Tick], Awaitable[Report]], json: bool, *, planned: bool = False) -> None:
    import asyncio

    from headrace_cli.commands.replay_report import as_json, show

    async def done(tick: Tick) -> Report:
        return await work(tick)

    with progress("reading the journal") as tick:
        report = asyncio.run(done(tick))
    if json:
        echo_json(as_json(report))
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
