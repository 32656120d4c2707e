"""One run of the chaos test: start the stack, load it, inject faults, wait until it catches up, compare the ledgers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from headrace_cli.progress import ProgressDisplay
from tests.chaos.balancer import Balancer
from tests.chaos.client import Client, ClientLedger, Load
from tests.chaos.ledgers import Facts, Findings, Reader, compare
from tests.chaos.nemeses import NEMESES, DiskFull, Nemesis, small_disk
from tests.chaos.schedule import Strike, plan
from tests.chaos.stack import LINEAGE, MODEL, Stack
from tests.support import tiny_model

WARM_UP_S = 3.0
_DRAIN_S_MAX = 1_800.0
_QUIET_S = 4.0
"""Seconds without new events after which the stack has caught up."""
_STALLED_S = 120.0
"""Seconds without new events after which missing events count as lost."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the caller."""

    bus: str
    seed: int
    nemeses: tuple[str, ...]
    strikes: int
    rate: float
    mean_pause_s: float


@dataclass(slots=True)
class Outcome:
    """Values of the report."""

    options: Options
    client: ClientLedger
    topics: Facts
    findings: Findings
    strikes: Counter[str]
    """Number of strikes by nemesis."""
    crashes: list[str]
    """Processes that ended without a planned kill, for example because the bus was away; the supervisor restarts them.
    """
    sessions: int
    load_s: float
    drain_s: float
    fates: dict[str, int] = field(default_factory=dict)
    """Number of turns in the account by outcome."""
    steps: int = 0


async def run(options: Options, progress: ProgressDisplay, keep: Path | None = None) -> Outcome:
    """Run the test once and return its result.

    Args:
        options: options of the command line.
        progress: display to update.
        keep: folder for data and logs; by default they are removed at the end of the run.

    Raises:
        TimeoutError: the stack does not become healthy again, which also breaks a promise.
        StartFailed: a process does not start.
    """
    with contextlib.ExitStack() as scratch:
        folder = keep or Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="headrace-chaos-")))
        folder = folder / options.bus
        base = await asyncio.to_thread(tiny_model.build, folder / "base", seed=options.seed % 2**31)
        if DiskFull.name in options.nemeses:
            scratch.enter_context(small_disk(folder / "a"))
            if keep is not None:  # before the small disk goes
                scratch.callback(_keep, folder / "a", folder / "kept-a")
        stack = Stack(folder, options.bus, base, progress.print_line)
        nemeses = {name: NEMESES[name](stack) for name in options.nemeses}
        stack.environ_of = lambda machine: _environ(nemeses.values(), machine)
        return await _run(options, stack, nemeses, progress)


def _environ(nemeses: Iterable[Nemesis], machine: str) -> dict[str, str]:
    return {name: value for nemesis in nemeses for name, value in nemesis.prepare(machine).items()}


async def _run(options: Options, stack: Stack, nemeses: Mapping[str, Nemesis], progress: ProgressDisplay) -> Outcome:
    ledger, facts = ClientLedger(), Facts()
    pairs = [(name, victim) for name, nemesis in nemeses.items() for victim in nemesis.victims(options.bus)]
    strikes = plan(options.seed, options.strikes, pairs, options.mean_pause_s)
    progress.update(doing="the stack starts")
    async with stack:
        progress.print_line("the stack is ready")
        async with _users(options, stack, ledger) as (load, balancer):
            await asyncio.sleep(WARM_UP_S)
            struck = await _break(strikes, nemeses, balancer, ledger, progress)
            load.stop.set()
        progress.print_line("the last users have left; waiting for everything to come back and catch up")
        for nemesis in nemeses.values():
            await nemesis.heal()
        await stack.all_ready()
        drain_s = await _catch_up(Reader(stack.bus, stack.blobs), ledger, facts, progress)
    trainer = stack.trainer_ledger()
    account = facts.account.close()
    fates = {"trained": account.trained, **{f"waiting for {k}": v for k, v in account.waiting.items()}}
    fates |= {f"dropped: {k}": v for k, v in account.dropped.items()}
    findings = compare(ledger, facts, account, trainer)
    return Outcome(
        options,
        ledger,
        facts,
        findings,
        struck,
        stack.crashes,
        load.sessions,
        load.seconds,
        drain_s,
        fates,
        trainer.steps,
    )


@contextlib.asynccontextmanager
async def _users(options: Options, stack: Stack, ledger: ClientLedger) -> AsyncIterator[tuple[Load, Balancer]]:
    """Run users during the block. Open sessions end after the block."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        balancer = Balancer(http, stack.gateways)
        load = Load(Client(http, balancer, ledger, MODEL), random.Random(options.seed), options.rate)
        watching = asyncio.create_task(balancer.run())
        working = asyncio.create_task(load.run())
        try:
            yield load, balancer
            await working
        finally:
            for task in (watching, working):
                task.cancel()
            await asyncio.gather(watching, working, return_exceptions=True)


async def _break(
    strikes: list[Strike],
    nemeses: Mapping[str, Nemesis],
    balancer: Balancer,
    ledger: ClientLedger,
    progress: ProgressDisplay,
) -> Counter[str]:
    """Strike according to the schedule. Wait while an earlier fault of the same kind still affects the victim."""
    struck: Counter[str] = Counter()
    began = time.monotonic()
    for number, strike in enumerate(strikes, 1):
        await asyncio.sleep(strike.pause_s)
        nemesis = nemeses[strike.nemesis]
        while nemesis.struck(strike.victim):  # noqa: ASYNC110 (what lasts ends by itself, and has no event for it)
            await asyncio.sleep(0.1)
        description = await nemesis.strike(strike.victim, balancer, random.Random(strike.seed))
        struck[strike.nemesis] += 1
        at = time.monotonic() - began
        counts = f"{len(ledger.acked)} turns acked, {len(ledger.failures)} requests failed"
        progress.update(number, doing=counts)
        progress.print_line(f"{at:6.1f} s  {number}/{len(strikes)} {strike.victim} {description}; {counts}")
    return struck


def _keep(folder: Path, target: Path) -> None:
    shutil.copytree(folder, target, symlinks=True, ignore_dangling_symlinks=True)


async def _catch_up(reader: Reader, ledger: ClientLedger, facts: Facts, progress: ProgressDisplay) -> float:
    """Wait until the stack has caught up, and return the seconds. The comparison reports events that never arrive."""

    def pending() -> bool:
        spooled = ledger.acked.keys() - facts.turns.keys() or ledger.feedback_ids - facts.feedback
        return bool(spooled) or any(facts.waiting(LINEAGE).values())

    began = quiet = time.monotonic()
    while time.monotonic() - began < _DRAIN_S_MAX:
        progress.update(doing=f"catching up, {len(ledger.acked.keys() - facts.turns.keys())} turns still come")
        if await reader.read(facts):
            quiet = time.monotonic()
        elif time.monotonic() - quiet >= (_STALLED_S if pending() else _QUIET_S):
            break
        await asyncio.sleep(1.0)
    return time.monotonic() - began
