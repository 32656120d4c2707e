"""Compare both buses: `python -m benchmarks.bus`. Writes `reports/bench-bus.json`.

Records are published and consumed as the services do: real turns through `EventProducer` (idempotent, acknowledged by
all replicas) and aiokafka's consumer. The buses alternate within each round, so that a busy machine disturbs both
equally. For rates the best round counts and the median is reported as well; for latencies all values count. Then the
latency from an answered call to its experience is measured with all services running, at 50 turns per second: p95 must
stay below 500 ms. The benchmark takes about three minutes.
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

from benchmarks import _rates
from headrace_cli.terminal import ProgressDisplay
from headrace_runtime.storage.blobs import BlobStore
from tests.support.servers import BrokerProcess, KafkaNode, missing_kafka

P95_MS_MAX = 500.0
RATE_SHARE_MIN = 0.9
"""Minimum share of the requested rate. Below it the latencies are those of another load."""


Server = BrokerProcess | KafkaNode
BUSES: dict[str, type[Server]] = {"embedded": BrokerProcess, "kafka": KafkaNode}


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[str]:
    """Run the bus as a process of its own and yield its address."""
    server = BUSES[name](folder)
    server.start()
    try:
        yield server.address
    finally:
        server.stop()


async def rates(
    root: Path, buses: list[str], rounds: int, scale: float, progress: ProgressDisplay
) -> dict[str, object]:
    """Measure all buses, one at a time. All of them run during the whole measurement."""
    blobs = BlobStore((root / "blobs").as_uri())
    results = {
        name: _rates.Rates(
            alone_count=int(200 * scale),
            concurrent_count=int(2000 * scale),
            bulk_count=int(4000 * scale),
            paced_s=2 * scale,
        )
        for name in buses
    }
    async with contextlib.AsyncExitStack() as stack:
        open_buses = []
        for name in buses:
            address = stack.enter_context(running(name, root / name))
            open_buses.append(await stack.enter_async_context(_rates.open_bus(address, blobs, results[name])))
        for _ in range(rounds):
            for name, bus in zip(buses, open_buses, strict=True):
                progress.update(activity=f"rates of the {name} bus")
                await bus.round()
                progress.advance()
    record = {"bytes": next(iter(results.values())).bytes_per_record}
    return {"record": record, **{name: result.result() for name, result in results.items()}}


async def end_to_end(root: Path, bus: str, rate: float, seconds: float, progress: ProgressDisplay) -> _rates.EndToEnd:
    progress.update(activity=f"end to end on the {bus} bus")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(running("kafka", root / "kafka")) if bus == "kafka" else None
        result = await _rates.measure(root, address, rate, seconds, seed=0)
    progress.advance()
    return result


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
    for bus, result in report.get("rates", {}).items():
        if bus == "record":
            print(f"records of {result['bytes']} bytes")
            continue
        for name, rate in result["per_s"].items():
            print(f"{bus:9} {name:22} {rate['best']:>7} per s (median {rate['median']})")
        for name, ms in result["ms"].items():
            print(f"{bus:9} {name:22} p50 {ms['p50']} ms, p95 {ms['p95']} ms, p99 {ms['p99']} ms")
    for bus, result in report.get("end_to_end", {}).items():
        answer, experience = result["answer_ms"], result["experience_ms"]
        print(
            f"{bus:9} end to end at {result['rate']} turns/s: p50 {experience['p50']} ms, p95 {experience['p95']} ms "
            f"from answer to experience ({result['missing']} of {result['experiences'] + result['missing']} missing); "
            f"answered in p50 {answer['p50']} ms, p95 {answer['p95']} ms ({result['failed']} requests failed)"
        )


def shortfalls(report: dict[str, Any], rate: float) -> list[str]:
    """Return the figures that miss their limit, by bus."""
    problems = []
    for bus, result in report.get("end_to_end", {}).items():
        if result["experience_ms"]["p95"] > P95_MS_MAX:
            problems.append(
                f"{bus}: p95 {result['experience_ms']['p95']} ms from answer to experience; "
                f"must be {P95_MS_MAX:g} or less"
            )
        if result["rate"] < RATE_SHARE_MIN * rate:
            problems.append(f"{bus}: {result['rate']} turns/s reached instead of {rate:g}: this machine is too busy")
        if result["missing"] or result["failed"]:
            problems.append(f"{bus}: {result['missing']} experiences missing, {result['failed']} requests failed")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["rates", "end-to-end"])
    parser.add_argument("--bus", choices=[*BUSES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of rate measurements")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the records of each round")
    parser.add_argument("--rate", type=float, default=50.0, help="turns per second, end to end")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of the end-to-end measurement")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-bus.json"))
    arguments = parser.parse_args()
    buses = list(BUSES) if arguments.bus == "both" else [arguments.bus]
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    }
    if "kafka" in buses and (reason := missing_kafka()):
        print(f"NOT RUN on kafka: {reason}")
        report["kafka_not_run"] = reason
        buses.remove("kafka")
    report |= measure(arguments, buses)
    report["shortfalls"] = shortfalls(report, arguments.rate)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    for line in report["shortfalls"]:
        print(f"limit missed: {line}")
    return 1 if report["shortfalls"] else 0


if __name__ == "__main__":
    sys.exit(main())
