"""Both buses side by side: `python -m benchmarks.bus`. Writes `reports/bench-bus.json`.

Publish and consume as our services do it: real turns through `EventProducer` (idempotent, acknowledged by all
replicas) and aiokafka's consumer. The buses take turns within each round, so that a busy machine disturbs them alike;
of rates the best round counts and the median stands beside it, of latencies all count. Then the way from an answered
call to its experience, with every service running, at 50 turns per second: p95 must stay below 500 ms. About three
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import _end_to_end, _rates
from headrace_cli.progress import ProgressDisplay
from headrace_runtime.blobs import BlobStore
from tests.support import kafka_node
from tests.support.broker_process import BrokerProcess
from tests.support.kafka_node import KafkaNode

P95_MS_WANTED = 500.0
RATE_SHARE_MIN = 0.9
"""Below this share of the wanted rate the latencies are those of another load."""


Server = BrokerProcess | KafkaNode
BUSES: dict[str, type[Server]] = {"embedded": BrokerProcess, "kafka": KafkaNode}


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[str]:
    """The bus as a process of its own; yields its address."""
    server = BUSES[name](folder)
    server.start()
    try:
        yield server.address
    finally:
        server.stop()


async def rates(
    root: Path, buses: list[str], rounds: int, scale: float, progress: ProgressDisplay
) -> dict[str, object]:
    """Every bus runs all the time, one at a time is measured."""
    blobs = BlobStore((root / "blobs").as_uri())
    found = {
        name: _rates.Rates(one=int(200 * scale), many=int(2000 * scale), bulk=int(4000 * scale), paced_s=2 * scale)
        for name in buses
    }
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for name in buses:
            address = stack.enter_context(running(name, root / name))
            opened.append(await stack.enter_async_context(_rates.opened(address, blobs, found[name])))
        for _ in range(rounds):
            for name, bus in zip(buses, opened, strict=True):
                progress.at(doing=f"rates of the {name} bus")
                await bus.round()
                progress.advance()
    record = {"bytes": next(iter(found.values())).bytes_per_record}
    return {"record": record, **{name: one.result() for name, one in found.items()}}


async def end_to_end(
    root: Path, bus: str, rate: float, seconds: float, progress: ProgressDisplay
) -> _end_to_end.EndToEnd:
    progress.at(doing=f"end to end on the {bus} bus")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(running("kafka", root / "kafka")) if bus == "kafka" else None
        found = await _end_to_end.measure(root, address, rate, seconds, seed=0)
    progress.advance()
    return found


def measure(arguments: argparse.Namespace, buses: list[str]) -> dict[str, object]:
    report: dict[str, object] = {}
    each = arguments.rounds * (arguments.only != "end-to-end") + (arguments.only != "rates")
    with (
        ProgressDisplay("bench-bus", each * len(buses), unit="parts") as progress,
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch,
    ):
        root = Path(scratch)
        if arguments.only != "end-to-end":
            report["rates"] = asyncio.run(rates(root / "rates", buses, arguments.rounds, arguments.scale, progress))
        if arguments.only != "rates":
            report["end_to_end"] = {
                bus: asdict(asyncio.run(end_to_end(root / bus, bus, arguments.rate, arguments.seconds, progress)))
                for bus in buses
            }
    return report


def show(report: dict[str, Any]) -> None:
    for bus, found in report.get("rates", {}).items():
        if bus == "record":
            print(f"records of {found['bytes']} bytes")
            continue
        for name, rate in found["per_s"].items():
            print(f"{bus:9} {name:22} {rate['best']:>7} per s (median {rate['median']})")
        for name, ms in found["ms"].items():
            print(f"{bus:9} {name:22} p50 {ms['p50']} ms, p95 {ms['p95']} ms, p99 {ms['p99']} ms")
    for bus, found in report.get("end_to_end", {}).items():
        answer, experience = found["answer_ms"], found["experience_ms"]
        print(
            f"{bus:9} end to end at {found['rate']} turns/s: p50 {experience['p50']} ms, p95 {experience['p95']} ms "
            f"from answer to experience ({found['missing']} of {found['experiences'] + found['missing']} missing); "
            f"answered in p50 {answer['p50']} ms, p95 {answer['p95']} ms ({found['failed']} requests failed)"
        )


def shortfalls(report: dict[str, Any], rate: float) -> list[str]:
    """What is not as wanted, by bus."""
    found = []
    for bus, one in report.get("end_to_end", {}).items():
        if one["experience_ms"]["p95"] > P95_MS_WANTED:
            found.append(
                f"{bus}: p95 {one['experience_ms']['p95']} ms from answer to experience, not {P95_MS_WANTED:g}"
            )
        if one["rate"] < RATE_SHARE_MIN * rate:
            found.append(f"{bus}: {one['rate']} turns/s reached, not {rate:g}: this machine is too busy to tell")
        if one["missing"] or one["failed"]:
            found.append(f"{bus}: {one['missing']} experiences missing, {one['failed']} requests failed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["rates", "end-to-end"])
    parser.add_argument("--bus", choices=[*BUSES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5, help="how often the rates are measured")
    parser.add_argument("--scale", type=float, default=1.0, help="how many records each round has, against the usual")
    parser.add_argument("--rate", type=float, default=50.0, help="turns per second, end to end")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the end-to-end way is measured")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-bus.json"))
    arguments = parser.parse_args()
    buses = list(BUSES) if arguments.bus == "both" else [arguments.bus]
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    }
    if "kafka" in buses and (reason := kafka_node.missing()):
        print(f"NOT RUN on kafka: {reason}")
        report["kafka_not_run"] = reason
        buses.remove("kafka")
    report |= measure(arguments, buses)
    report["shortfalls"] = shortfalls(report, arguments.rate)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    for line in report["shortfalls"]:
        print(f"short of what is wanted: {line}")
    return 1 if report["shortfalls"] else 0


if __name__ == "__main__":
    sys.exit(main())
