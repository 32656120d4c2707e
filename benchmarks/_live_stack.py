"""A private Headrace for demos that make their versions themselves: all services except trainer and judge.

Acceptance lines and reports that the demos on a live stack share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from tests.support.ports import free_port


@dataclass(frozen=True, slots=True)
class LiveStack:
    """A running stack, with the producer and the blob store for new versions."""

    supervisor: Supervisor
    producer: EventProducer
    blobs: BlobStore


@contextlib.asynccontextmanager
async def live_stack(folder: Path, settings: Mapping[str, object]) -> AsyncIterator[LiveStack]:
    """Run a stack with its data in `folder / "data"`, and stop it at the end."""
    supervisor = Supervisor(
        folder / "data",
        settings={**settings, "broker.kafka_port": free_port()},
        without=("trainer", "judge"),
        auto_ports=True,
        environ={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
    )
    blobs = BlobStore.open(Common(data_dir=folder / "data"))
    producer = EventProducer(Overrides(None, {}, {}).bus_settings(supervisor.plan.bus), "headrace/demo", blobs)
    supervisor.start()
    try:
        await asyncio.to_thread(supervisor.wait_up)
        await producer.start()
        yield LiveStack(supervisor, producer, blobs)
    finally:
        await producer.stop()
        await asyncio.to_thread(supervisor.stop)


@dataclass
class Line:
    """Acceptance line with its measured values."""

    name: str
    holds: bool
    details: str


def print_now(text: str) -> None:
    print(text, flush=True)


def report(target: str, lines: Sequence[Line], numbers: Mapping[str, object], wall_s: float) -> int:
    """Print the lines and write `reports/<target>.json`. Return exit status 1 if a line does not hold."""
    print_now("")
    for line in lines:
        print_now(f"{'holds' if line.holds else 'DOES NOT HOLD':14} {line.name}: {line.details}")
    path = Path("reports") / f"{target}.json"
    path.parent.mkdir(exist_ok=True)
    written = {"lines": [vars(line) for line in lines], "numbers": numbers, "wall_s": round(wall_s, 1)}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print_now(f"written: {path}")
    return 0 if all(line.holds for line in lines) else 1
