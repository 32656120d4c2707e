"""Chaos test: faults of every process under load, and three ledgers that must agree afterwards.

The report of a run is a short table for people, and the same values as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from headrace.errors import HeadraceError
from headrace_cli.terminal import ProgressDisplay
from tests.chaos.balancer import Balancer
from tests.chaos.client import Client, ClientLedger, Load
from tests.chaos.ledgers import DOUBLE, FAILED, LOST, SHOWN, VALUES, Facts, Findings, Reader, compare
from tests.chaos.nemeses import BUS, NEMESES, DiskFull, Nemesis, Strike, plan, small_disk
from tests.chaos.stack import LINEAGE, MODEL, Stack
from tests.support import tiny_model
from tests.support.servers import missing_kafka
from tests.system.program import Line, Program, Run, at_most

WARM_UP_S = 3.0
_DRAIN_S_MAX = 1_800.0
_QUIET_S = 4.0
"""Seconds without new events after which the stack has caught up."""
_STALLED_S = 120.0
"""Seconds without new events after which missing events count as lost."""
ALWAYS = (LOST, DOUBLE, FAILED, VALUES)
"""Promises that the report always shows; the others appear only when they are broken."""


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


async def play_strikes(options: Options, progress: ProgressDisplay, keep: Path | None = None) -> Outcome:
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
        return await _play_strikes(options, stack, nemeses, progress)


def _environ(nemeses: Iterable[Nemesis], machine: str) -> dict[str, str]:
    return {name: value for nemesis in nemeses for name, value in nemesis.prepare(machine).items()}


async def _play_strikes(
    options: Options, stack: Stack, nemeses: Mapping[str, Nemesis], progress: ProgressDisplay
) -> Outcome:
    ledger, facts = ClientLedger(), Facts()
    pairs = [(name, victim) for name, nemesis in nemeses.items() for victim in nemesis.victims(options.bus)]
    strikes = plan(options.seed, options.strikes, pairs, options.mean_pause_s)
    progress.update(activity="the stack starts")
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
        progress.update(number, activity=counts)
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
        progress.update(activity=f"catching up, {len(ledger.acked.keys() - facts.turns.keys())} turns still come")
        if await reader.read(facts):
            quiet = time.monotonic()
        elif time.monotonic() - quiet >= (_STALLED_S if pending() else _QUIET_S):
            break
        await asyncio.sleep(1.0)
    return time.monotonic() - began


def table(outcome: Outcome) -> list[str]:
    """Return the lines of a table with the three ledgers, followed by the promises."""
    client, topics, findings = outcome.client, outcome.topics, outcome.findings
    ms = latencies_ms(client.latencies_s)
    strikes = ", ".join(f"{name} {count}" for name, count in sorted(outcome.strikes.items()))
    lines = [
        f"{outcome.options.bus} bus, seed {outcome.options.seed}: {outcome.strikes.total()} strikes ({strikes})",
        f"load     {rate(outcome):.1f} turns/s for {outcome.load_s:.0f} s in {outcome.sessions} sessions; answered in "
        f"p50 {ms['p50']} ms, p95 {ms['p95']} ms, at most {ms['max']} ms; caught up {outcome.drain_s:.0f} s later",
        f"client   {len(client.acked)} turns acked, {client.retried} attempts lost with a gateway and made again, "
        f"{client.refused} refused by a full disk, "
        f"{len(client.failures)} of {client.requests} requests failed",
        f"topics   {len(topics.turns)} turns captured = "
        + " + ".join(f"{count} {status}" for status, count in outcome.fates.items() if count),
        f"trainer  {len(topics.experiences)} experience revisions, {_trained(outcome)} of them trained in "
        f"{outcome.steps} steps; {sum(topics.redelivered.values())} events came twice and count once",
    ]
    if outcome.crashes:
        ended = Counter(outcome.crashes)
        lines.append("crashed  " + "; ".join(f"{line} ({count})" for line, count in sorted(ended.items())))
    lines.append(
        f"feedback for {len(client.judged)} sessions, {_through_several(outcome)} of them through several gateways"
    )
    for promise, count in findings.table.items():
        if count or promise in ALWAYS:
            lines.append(f"{'BROKEN' if count else 'held':8} {count} {promise}")
            lines += [f"         - {example}" for example in findings.broken.get(promise, [])[:SHOWN]]
    return lines


def as_json(outcome: Outcome) -> dict[str, object]:
    client, topics = outcome.client, outcome.topics
    return {
        "bus": outcome.options.bus,
        "seed": outcome.options.seed,
        "strikes": dict(sorted(outcome.strikes.items())),
        "strikes_total": outcome.strikes.total(),
        "crashes": dict(sorted(Counter(outcome.crashes).items())),
        "cores": os.cpu_count(),
        "turns_per_s_wanted": outcome.options.rate,
        "turns_per_s": round(rate(outcome), 2),
        "load_s": round(outcome.load_s, 1),
        "drain_s": round(outcome.drain_s, 1),
        "latency_ms": latencies_ms(client.latencies_s),
        "client": {
            "turns_acked": len(client.acked),
            "sessions": outcome.sessions,
            "sessions_ended": len(client.ended),
            "feedback_acked": len(client.feedback_ids),
            "requests": client.requests,
            "attempts_retried": client.retried,
            "attempts_refused_by_a_full_disk": client.refused,
            "requests_failed": dict(client.failed_by),
        },
        "topics": {
            "turns": len(topics.turns),
            "trajectories": len(topics.trajectories),
            "experience_revisions": len(topics.experiences),
            "records": dict(sorted(topics.records.items())),
            "redelivered": dict(sorted(topics.redelivered.items())),
            "fates_of_turns": outcome.fates,
        },
        "judged": {"sessions": len(client.judged), "through_several_gateways": _through_several(outcome)},
        "trainer": {"steps": outcome.steps, "revisions_trained": _trained(outcome)},
        "promises": outcome.findings.table,
        "broken": {promise: offenders[:SHOWN] for promise, offenders in outcome.findings.broken.items()},
    }


def rate(outcome: Outcome) -> float:
    """Return the answered turns per second while users arrived."""
    return len(outcome.client.acked) / outcome.load_s if outcome.load_s else 0.0


def latencies_ms(seconds: Sequence[float]) -> dict[str, int]:
    if len(seconds) < 2:
        return {"p50": 0, "p95": 0, "max": 0}
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(cuts[49] * 1e3), "p95": round(cuts[94] * 1e3), "max": round(max(seconds) * 1e3)}


def _through_several(outcome: Outcome) -> int:
    """Count the sessions whose feedback went through several gateways, so that only the log defines its order."""
    return sum(len(outcome.client.reached[session]) > 1 for session in outcome.client.judged)


def _trained(outcome: Outcome) -> int:
    return sum(
        outcomes.count(None) for outcomes_of in outcome.topics.verdicts.values() for outcomes in outcomes_of.values()
    )


def play(run: Run) -> None:
    options = run.options
    buses = list(BUS) if options.bus == "both" else [options.bus]
    for bus in buses:
        if bus == "kafka" and (reason := missing_kafka()):
            if options.bus != "both":
                raise HeadraceError(f"the Kafka bus cannot run here: {reason}")
            run.skip("kafka", reason)
            run.figures[bus] = {"not_run": reason}
            continue
        _play_on(run, bus)


def _play_on(run: Run, bus: str) -> None:
    nemeses = _nemeses(run, bus)
    options = Options(bus, run.seed, nemeses, run.options.strikes, run.options.rate, run.options.pause)
    try:
        outcome = asyncio.run(_strike(run, options))
    except (TimeoutError, HeadraceError) as error:
        stopped = f"{type(error).__name__}: {error}"
        run.figures[bus] = {"stopped": stopped}
        run.add(Line(f"{bus} bus: played to its end", stopped, "yes", holds=False))
        return
    run.figures[bus] = as_json(outcome)
    print("\n".join(table(outcome)), flush=True)
    for promise, count in outcome.findings.table.items():
        run.add(at_most(f"{bus} bus: {promise}", count, 0))


def _nemeses(run: Run, bus: str) -> tuple[str, ...]:
    """Return the requested nemeses that are possible on this bus, and report the others as skipped."""
    missing = {name: reason for name in run.options.nemesis if (reason := NEMESES[name].missing(bus))}
    for name, reason in missing.items():
        run.skip(f"{name} on {bus}", reason)
    return tuple(name for name in run.options.nemesis if name not in missing)


async def _strike(run: Run, options: Options) -> Outcome:
    """Run the stack with its faults. A signal ends every process that the test started."""
    with run.progress(options.strikes, "strikes", estimate=False) as progress:
        task = asyncio.ensure_future(play_strikes(options, progress, run.options.keep))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, task.cancel)
        return await task


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bus", choices=[*BUS, "both"], default="both", help="bus under test (default: %(default)s)")
    parser.add_argument(
        "--nemesis",
        type=_names,
        default=[*NEMESES],
        help=f"kinds of strikes, separated by commas (default: all of {', '.join(NEMESES)})",
    )
    parser.add_argument("--strikes", type=int, default=100, help="number of strikes (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=50.0, help="turns per second (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between strikes (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="an empty folder in which data and logs stay")


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NEMESES]:
        raise argparse.ArgumentTypeError(f"no nemesis {unknown[0]!r}; there are {', '.join(NEMESES)}")
    return names


PROGRAM = Program("Strike every process under load and compare three ledgers.", play, _add_arguments)
