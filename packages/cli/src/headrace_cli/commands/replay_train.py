"""`headrace replay plan | run | resume | offer | list | remove`: training on stored events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace_cli.commands.shared import (
    PANEL,
    AsJson,
    BusAddress,
    Config,
    DataDir,
    RangeOptions,
    command,
    console,
    echo,
    echo_json,
    progress,
    running_state,
)

if TYPE_CHECKING:
    from headrace_operations.replay.pipeline import Tick
    from headrace_operations.replay.request import Report, Request
    from headrace_operations.supervisor.overrides import Overrides

_CHANGES_PANEL = "Changes"
_BATCH_SETTINGS = ("trainer.batch_", "trainer.group_", "trainer.pair_", "trainer.advantage", "trainer.algorithm")
"""Prefixes of settings that determine batches: if one of them is changed, recorded cuts are not used."""
Name = Annotated[str, typer.Argument(help="Name of the new lineage.", metavar="LINEAGE")]
ReplayLineage = Annotated[str, typer.Argument(help="Lineage of the replay.", metavar="LINEAGE")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Override a setting for the replay; may be repeated.",
        metavar="SECTION.KEY=VALUE",
        rich_help_panel=_CHANGES_PANEL,
    ),
]


def _check_algorithm(algorithm: str | None) -> str | None:
    """Return the algorithm if it is built in or announced by an installed package.

    Raises:
        typer.BadParameter: no package announces it.
    """
    from headrace_runtime.registries import PluginError, Registry

    try:
        if algorithm is not None:
            Registry("algorithms", object, "algorithm").point(algorithm)
    except PluginError as error:
        raise typer.BadParameter(str(error)) from None
    return algorithm


@dataclass(frozen=True)
class Changes:
    """Command line options by which a replay differs from the original training."""

    rewards: Annotated[
        list[str] | None,
        typer.Option(
            help="Score with this reward function instead; may be repeated.",
            metavar="FILE.py:NAME",
            rich_help_panel=_CHANGES_PANEL,
        ),
    ] = None
    rescore: Annotated[
        bool,
        typer.Option(
            "--rescore",
            help="Score again with the reward functions and weights of the settings.",
            rich_help_panel=_CHANGES_PANEL,
        ),
    ] = False
    judge: Annotated[
        bool,
        typer.Option(
            "--judge",
            help="Let the judge of the settings judge again, then score again.",
            rich_help_panel=_CHANGES_PANEL,
        ),
    ] = False
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Train with this algorithm instead.", callback=_check_algorithm, rich_help_panel=_CHANGES_PANEL
        ),
    ] = None
    settings: Set = None
    of: Annotated[
        str | None,
        typer.Option(help="Original lineage; default: the live lineage.", metavar="LINEAGE", rich_help_panel=PANEL),
    ] = None
    cut: Annotated[
        Literal["auto", "recorded", "rules"],
        typer.Option(
            help="Cut batches as recorded or by the rules of the settings; auto: as recorded if nothing is changed.",
            rich_help_panel=_CHANGES_PANEL,
        ),
    ] = "auto"

    @property
    def topic(self) -> str:
        """Topic that is replayed: trajectories if rewards are computed again, otherwise experiences."""
        return "trajectories" if self.rewards or self.rescore or self.judge else "experiences"


@dataclass(frozen=True)
class ReplayRange(RangeOptions):
    """Options that select the range of a topic to replay, optionally limited to versions."""

    version: Annotated[
        list[str] | None,
        typer.Option(
            "--version",
            help="Select only records in which this version took part; may be repeated.",
            metavar="NAME@DIGEST",
            rich_help_panel=PANEL,
        ),
    ] = None


@dataclass(frozen=True)
class SettingsOptions:
    """Options that select the settings file, the bus and the data directory."""

    config: Config = None
    bus: BusAddress = None
    data_dir: DataDir = None

    def address(self, overrides: Overrides) -> str:
        """Return the address of the bus from the option, the setting, or the Headrace that runs here."""
        return self.bus or str(overrides.get("bus.address") or "") or running_state(self.data_dir).bus


@dataclass(frozen=True)
class ReplayBus:
    """Options that select the bus: by address, by the environment, or that of the Headrace that runs here."""

    bus: BusAddress = None
    data_dir: DataDir = None

    @property
    def address(self) -> str:
        import os

        from headrace_operations.supervisor.overrides import Overrides

        return SettingsOptions(None, self.bus, self.data_dir).address(Overrides(None, {}, os.environ))


def plan(
    lineage: Name = "replayed",
    *,
    changes: Changes,
    range_options: ReplayRange,
    settings_options: SettingsOptions,
    json: AsJson = False,
) -> None:
    """Show what `replay run` with the same options would do, without writing anything.

    Counts the records by kind and version, scores them if rewards change, and simulates the training without a model:
    what would be trained, what would be dropped and why, and whether the batches equal the original ones byte for byte.
    """
    from headrace_operations.replay import runner

    request = _request(lineage, changes, range_options, settings_options)
    _run_and_show(lambda tick: runner.plan(request, tick), json, planned=True)


def run(
    lineage: Name,
    *,
    changes: Changes,
    range_options: ReplayRange,
    settings_options: SettingsOptions,
    json: AsJson = False,
) -> None:
    """Train a new lineage on stored experiences, or on stored trajectories with another reward.

    With --rewards, --rescore or --judge, the range options select records of the topic `trajectories`, otherwise
    records of the topic `experiences`. The live services are not affected: no consumer group is used, the results are
    written to topics of the replay, and its versions are not served before `replay offer` hands one to the registry.
    """
    from headrace_operations.replay import runner

    _run_and_show(partial(runner.run, _request(lineage, changes, range_options, settings_options)), json)


def resume(
    lineage: ReplayLineage,
    *,
    settings: Set = None,
    settings_options: SettingsOptions,
    json: AsJson = False,
) -> None:
    """Resume a replay whose training was interrupted, from its last save.

    Use the same settings as for `run`.
    """
    from headrace_operations.replay import runner

    request = _request(lineage, Changes(settings=settings), ReplayRange(), settings_options)
    _run_and_show(lambda tick: runner.resume(request, tick), json)


def offer(
    lineage: ReplayLineage,
    version: Annotated[
        str | None, typer.Option(help="Version to offer; default: the last one.", metavar="NAME@DIGEST")
    ] = None,
    *,
    bus_options: ReplayBus,
) -> None:
    """Offer a replayed version to the registry, which probes it, evaluates it, and promotes or rejects it.

    `headrace models show` shows the decision.
    """
    import asyncio

    from headrace_operations.replay.program import offer_version as announce

    checkpoint = asyncio.run(announce(bus_options.address, lineage, version))
    console().print(f"{checkpoint.version} is offered; follow it with `headrace models show {checkpoint.model}`")


def list_(*, bus_options: ReplayBus) -> None:
    """List the lineages of all replays on this bus."""
    import asyncio

    from headrace_operations.replay.copying import lineages

    for name in asyncio.run(lineages(bus_options.address)):
        echo(name)


def remove(lineage: ReplayLineage, *, bus_options: ReplayBus) -> None:
    """Delete the topics of a replay. Its versions stay in the blob store."""
    import asyncio

    from headrace_operations.replay.copying import remove as delete

    for name in asyncio.run(delete(bus_options.address, lineage)):
        console().print(f"deleted {name}")


def _request(lineage: str, changes: Changes, range_options: ReplayRange, settings_options: SettingsOptions) -> Request:
    """Build the replay request from command line options, which override the settings file."""
    import os

    from headrace_operations.replay.request import make
    from headrace_operations.supervisor.overrides import Overrides, parse_assignments

    changed = parse_assignments(changes.settings or [])
    overrides = Overrides(settings_options.config, changed, os.environ)
    if settings_options.data_dir is not None:
        overrides.set("data_dir", settings_options.data_dir.absolute())
    if changes.rewards:
        overrides.set("scorer.functions", changes.rewards)
    if changes.algorithm:
        overrides.set("trainer.algorithm", changes.algorithm)
        for kind in ("trainer.advantage.kind", "trainer.loss.kind"):
            overrides.set(kind, "")  # the settings file configures them for another algorithm
    cuts_changed = changes.algorithm or any(name.startswith(_BATCH_SETTINGS) for name in changed)
    return make(
        lineage,
        range_options.range_of(changes.topic),
        overrides,
        settings_options.address(overrides),
        of=changes.of,
        versions=frozenset(range_options.version or ()),
        judge=changes.judge,
        cut="rules" if changes.cut == "auto" and cuts_changed else changes.cut,
    )


def _run_and_show(work: Callable[[Tick], Awaitable[Report]], json: bool, *, planned: bool = False) -> None:
    import asyncio

    from headrace_cli.commands.replay import as_json, show

    async def run(tick: Tick) -> Report:
        return await work(tick)

    with progress("reading the journal") as tick:
        report = asyncio.run(run(tick))
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
