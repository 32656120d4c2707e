"""A private Headrace for demos that make their versions themselves: all services except trainer and judge."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
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
