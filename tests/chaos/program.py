"""Strikes on every process under load, and three ledgers that must agree afterwards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from pathlib import Path

from headrace.errors import HeadraceError
from tests.chaos import report
from tests.chaos.nemeses import NEMESES
from tests.chaos.run import Options, Outcome
from tests.chaos.run import run as play_strikes
from tests.chaos.victims import BUS
from tests.support import kafka_node
from tests.system.line import Line, at_most
from tests.system.program import Program, Run


def play(run: Run) -> None:
    options = run.options
    buses = list(BUS) if options.bus == "both" else [options.bus]
    for bus in buses:
        if bus == "kafka" and (reason := kafka_node.missing()):
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
    run.figures[bus] = report.as_json(outcome)
    print("\n".join(report.table(outcome)), flush=True)
    for promise, count in outcome.findings.table.items():
        run.add(at_most(f"{bus} bus: {promise}", count, 0))


def _nemeses(run: Run, bus: str) -> tuple[str, ...]:
    """Return the requested nemeses that can strike on this bus, and report the others as skipped."""
    missing = {name: reason for name in run.options.nemesis if (reason := NEMESES[name].missing(bus))}
    for name, reason in missing.items():
        run.skip(f"{name} on {bus}", reason)
    return tuple(name for name in run.options.nemesis if name not in missing)


async def _strike(run: Run, options: Options) -> Outcome:
    """Play the strikes. A signal ends every process that was started."""
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
