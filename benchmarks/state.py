"""Periodic work on large databases: `python -m benchmarks.state`. Writes `reports/bench-state.json`.

Each database is filled with 5M remembered turns, some of which are due to be forgotten. Then all timers of collector
and scorer run concurrently until no work is left, with pauses between their transactions as in the service. 99 of 100
transactions must end within 20 ms, and 500 turns per second must be forgotten. A backlog of reward function jobs, as
after a restart, must be scored at 900 turns per second. The exit status is 1 otherwise. The benchmark takes about
twenty minutes; `--turns` makes it shorter. SQLite's pages are limited to 256 MiB of memory and files to 8 GiB of disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._run_processes import Summary, chosen_databases
from headrace_cli.terminal import ProgressDisplay
from headrace_collector import schema as collector_schema
from headrace_collector import upkeep as collector
from headrace_collector.handlers import Collector
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import SystemClock, epoch_ms
from headrace_runtime.stream.processor import Processor, Step, run_until_finished
from headrace_schemas import Message
from headrace_scorer import schema as scorer_schema
from headrace_scorer import upkeep as scorer
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import CallRequest, Outcome
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.handlers import Scorer
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache
from tests.support import servers
from tests.support.remembered import Ages, fill_collector, fill_scorer
from tests.support.streams import Service, bench
from tests.support.turns import START, ask, closed, user

TICK_MS_MAX = 20.0
FORGOTTEN_PER_S_MIN = 500.0
BACKLOG_PER_S_MIN = 900.0
_IDLE_TICKS = 50
"""Number of runs of each timer after no work is left."""


async def measure(processor: Processor, steps: Mapping[str, Step], turns_old: int, name: str) -> dict[str, object]:
    """Run the timers until no work is left, then some more times."""
    ticks: dict[str, list[float]] = {name: [] for name in steps}

    turn = asyncio.Lock()

    async def timed(name: str) -> bool:
        async with turn:  # the wait for another timer is not measured
            began = time.perf_counter()
            more = await processor.step(steps[name])
            ticks[name].append((time.perf_counter() - began) * 1000)
        return more

    began = time.monotonic()
    with ProgressDisplay(f"bench-state, {name}", activity=f"forgetting {turns_old:,} turns"):
        await asyncio.gather(*(run_until_finished(SystemClock(), partial(timed, step)) for step in steps))
        took_s = time.monotonic() - began
        for step in steps:
            for _ in range(_IDLE_TICKS):
                await timed(step)
    together = [ms for durations in ticks.values() for ms in durations]
    return {
        "forgotten_per_s": round(turns_old / took_s, 1),
        "tick_ms": {name: _quantiles(durations) for name, durations in ({"all": together} | ticks).items()},
    }


def _quantiles(durations: list[float]) -> dict[str, float]:
    summary = Summary.of(durations)
    return {"ticks": len(durations), **summary.latency(), "max": round(summary.quantile(1.0), 2)}


async def collect(url: str, folder: Path, turns: int, old: int, name: str) -> dict[str, object]:
    settings = CollectorSettings()
    service = Service(tables=collector_schema.stream, handlers={}, package="headrace_collector")
    async with bench(service, url, folder) as open_bench:
        ages = Ages(epoch_ms(START), settings.remember_s, old=old, kept=old, open=min(10_000, turns // 10))
        began = time.monotonic()
        with ProgressDisplay(f"bench-state, {name} collector", unit="rows", activity="filling") as progress:
            await fill_collector(open_bench.processor.database, turns, ages, progress.update)
        fill_s = round(time.monotonic() - began, 1)
        steps: dict[str, Step] = {
            "forget": partial(collector.delete_old_rows, settings=settings),
            "keep_bounds": partial(collector.close_surplus_sessions, settings=settings),
            "find_targets": partial(collector.check_feedback_targets, settings=settings),
            "forget_ids": open_bench.processor._forget_ids,
        }
        return {"fill_s": fill_s, **await measure(open_bench.processor, steps, old, name)}


async def score(url: str, folder: Path, turns: int, old: int, name: str) -> dict[str, object]:
    settings = ScorerSettings()
    service = Service(tables=scorer_schema.stream, handlers={}, package="headrace_scorer")
    async with bench(service, url, folder) as open_bench:
        ages = Ages(epoch_ms(START), settings.retention_s, old=old, kept=0, open=min(10_000, turns // 10))
        began = time.monotonic()
        with ProgressDisplay(f"bench-state, {name} scorer", unit="rows", activity="filling") as progress:
            await fill_scorer(open_bench.processor.database, turns, ages, progress.update)
        fill_s = round(time.monotonic() - began, 1)
        steps: dict[str, Step] = {
            **{forget.__name__: partial(forget, retention_s=settings.retention_s) for forget in scorer.FORGETTING},
            "measure": scorer.measure,
            "forget_ids": open_bench.processor._forget_ids,
        }
        return {"fill_s": fill_s, **await measure(open_bench.processor, steps, old, name)}


class _ConstantPool(FunctionPool):
    """Pool with one function that takes no time, so that the scorer itself is measured."""

    def __init__(self, settings: ScorerSettings) -> None:
        super().__init__(settings)
        digest = "0" * 64
        self.functions = (RewardFunction(name="worth", spec="here", parameters=(), asynchronous=False, digest=digest),)

    async def call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        del call, trajectory
        return Outcome(outcome="scored", value=0.5)


async def backlog(url: str, folder: Path, turns: int) -> dict[str, object]:
    """Score `turns` trajectories of a turn each whose jobs are all in the database, and return the rate."""
    settings, cache = ScorerSettings(), TrajectoryCache()
    scores = ScoreStore(cache)
    scoring = Scoring(_ConstantPool(settings), settings, cache, scores)
    handler = Scorer(settings, cache, scores, scoring)
    service = Service(scorer_schema.stream, {"trajectories": handler.on_trajectory}, package="headrace_scorer")
    async with bench(service, url, folder) as open_bench:
        for first in range(0, turns, 200):
            some = range(first, min(first + 200, turns))
            await open_bench.deliver(*[closed(ask([user("q")], session=f"s{n}"), session=f"s{n}") for n in some])
        open_bench.processor.clock = SystemClock()
        busy_s, began = time.process_time(), time.monotonic()
        tasks = [asyncio.ensure_future(task) for task in scoring.tasks(open_bench.processor)]
        try:
            while await open_bench.count("jobs"):
                if any(task.done() for task in tasks):
                    raise RuntimeError(f"a task of the scorer ended: {tasks}")
                await asyncio.sleep(0.1)
        finally:
            took_s = time.monotonic() - began
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return {"backlog_per_s": round(turns / took_s, 1), "busy": round((time.process_time() - busy_s) / took_s, 2)}


async def intake(url: str, folder: Path, turns: int) -> dict[str, object]:
    """Return the rate at which the collector takes in turns of a conversation of 500 turns."""
    handler = Collector(CollectorSettings(), START)
    service = Service(collector_schema.stream, {"turns": handler.on_turn}, package="headrace_collector")
    texts = [("user" if number % 2 == 0 else "assistant", f"message {number} " + "word " * 30) for number in range(999)]
    messages = [Message.model_validate({"role": role, "content": content}) for role, content in texts]
    async with bench(service, url, folder) as open_bench:
        records = open_bench.produce(*[ask(messages, session=f"s{number}", at=number) for number in range(turns)])
        began = time.monotonic()
        for first in range(0, turns, 50):
            await open_bench.deliver(*records[first : first + 50])
        return {"intake_per_s": round(turns / (time.monotonic() - began), 1)}


def measure_database(name: str, turns: int, old: int, waiting: int) -> dict[str, dict[str, object]]:
    """Measure both services on one database; with `turns` 0 only the backlog."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        node = servers.PostgresNode(root) if name == "postgres" else None
        if node is not None:
            node.start()
        try:
            url = node.url() if node is not None else "sqlite"
            scorer_rates = asyncio.run(backlog(url, root / "backlog", waiting))
            collector_rates = asyncio.run(intake(url, root / "intake", max(50, waiting // 10)))
            if not turns:
                return {"collector": collector_rates, "scorer": scorer_rates}
            return {
                "collector": asyncio.run(collect(url, root / "collector", turns, old, name)) | collector_rates,
                "scorer": asyncio.run(score(url, root / "scorer", turns, old, name)) | scorer_rates,
            }
        finally:
            if node is not None:
                node.stop()


def shortfalls(report: Mapping[str, Any]) -> list[str]:
    problems = []
    for database, services in report["databases"].items():
        for service, result in services.items():
            if result.get("backlog_per_s", BACKLOG_PER_S_MIN) < BACKLOG_PER_S_MIN:
                problems.append(
                    f"{database} {service}: backlog at {result['backlog_per_s']} turns/s; must be {BACKLOG_PER_S_MIN:g}"
                )
            if "tick_ms" not in result:
                continue
            if result["tick_ms"]["all"]["p99"] > TICK_MS_MAX:
                problems.append(
                    f"{database} {service}: p99 of a tick {result['tick_ms']['all']['p99']} ms; "
                    f"must be at most {TICK_MS_MAX:g}"
                )
            if result["forgotten_per_s"] < FORGOTTEN_PER_S_MIN:
                problems.append(
                    f"{database} {service}: {result['forgotten_per_s']} turns/s forgotten; "
                    f"must be {FORGOTTEN_PER_S_MIN:g}"
                )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5_000_000, help="remembered turns; 0 measures only the backlog")
    parser.add_argument("--backlog", type=int, default=5_000, help="turns that wait for their reward functions")
    parser.add_argument("--old", type=int, default=10_000, help="remembered turns that are due to be forgotten")
    parser.add_argument("--database", choices=["sqlite", "postgres", "both"], default="both")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-state.json"))
    arguments = parser.parse_args()
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    report: dict[str, Any] = {"machine": machine, "turns": arguments.turns, "databases": {}}
    for name in chosen_databases(arguments.database, report):
        report["databases"][name] = measure_database(name, arguments.turns, arguments.old, arguments.backlog)
        for service, result in report["databases"][name].items():
            if "backlog_per_s" in result:
                print(
                    f"{name} {service}: backlog at {result['backlog_per_s']} turns/s, {result['busy']:.0%} busy",
                    flush=True,
                )
            if "intake_per_s" in result:
                print(f"{name} {service}: intake of long turns at {result['intake_per_s']} turns/s", flush=True)
            if "tick_ms" not in result:
                continue
            tick = result["tick_ms"]["all"]
            print(
                f"{name} {service}: a tick p50 {tick['p50']} ms, p99 {tick['p99']} ms, at most {tick['max']} ms; "
                f"{result['forgotten_per_s']} turns/s forgotten",
                flush=True,
            )
    report["shortfalls"] = shortfalls(report)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    for line in report["shortfalls"]:
        print(f"limit missed: {line}")
    return 1 if report["shortfalls"] else 0


if __name__ == "__main__":
    sys.exit(main())
