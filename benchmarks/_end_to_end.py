"""Latency from the answered call to the experience, with all services that `headrace up` starts.

Users call the gateway at a given rate, a tiny model answers, and each session ends with feedback immediately after its
last answer. The latency is measured from the end of that answer until a consumer of `experiences` has decoded the
event. The trainer trains on the same two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks._run_processes import Summary
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience
from headrace_schemas.http.stack_access import key_for
from tests.chaos.balancer import Balancer
from tests.chaos.client import Client, ClientLedger
from tests.chaos.load import Load
from tests.support import tiny_model
from tests.support.ports import free_port
from tests.support.processes import wait_until

MODEL = "bench"
WARM_UP_S = 8.0
_READY_S = 300.0
_LAST_S = 15.0
"""Timeout for the last experiences."""
REWARDS = "def short(trajectory):\n    return 1.0 if len(trajectory.final_answer) < 12 else 0.0\n"


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Measurements after the warm-up."""

    rate: float
    turns: int
    experiences: int
    missing: int
    failed: int
    answer_ms: dict[str, float]
    experience_ms: dict[str, float]

    @property
    def p95_ms(self) -> float:
        return self.experience_ms["p95"]


async def measure(folder: Path, bus: str | None, rate: float, seconds: float, seed: int) -> EndToEnd:
    """Measure one run. With `bus` None, the embedded broker is used. Raises `StartFailed` or `TimeoutError` if services
    do not start."""
    base = await asyncio.to_thread(tiny_model.build, folder / "base")
    supervisor = Supervisor(
        folder / "data",
        settings=_settings(folder, base, bus),
        auto_ports=True,
        environ={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
    )
    supervisor.start()
    try:
        await asyncio.to_thread(supervisor.wait_ready, _READY_S)
        return await _measure_load(supervisor, rate, seconds, seed)
    finally:
        await asyncio.to_thread(supervisor.stop)


def _settings(folder: Path, base: Path, bus: str | None) -> dict[str, object]:
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS)
    return {
        **({"bus.address": bus} if bus else {"broker.kafka_port": free_port()}),
        "inference.torch.device": "cpu",
        "scorer.functions": [f"{rewards}:short"],
        "scorer.required": ["feedback"],
        "trainer.base": base,
        "trainer.model": MODEL,
        "trainer.batch_experiences_min": 1,
        "trainer.batch_wait_s": 3,
        "trainer.steps_per_version": 8,
        "trainer.optimizer.learning_rate": 1e-4,
        "trainer.compute.device": "cpu",
    }


async def _measure_load(supervisor: Supervisor, rate: float, seconds: float, seed: int) -> EndToEnd:
    ledger = ClientLedger()
    seen: dict[str, float] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = Client(http, Balancer(http, [supervisor.url("gateway")]), ledger, MODEL)
        await _wait_until_served(http, supervisor.url("inference"))
        load = Load(client, random.Random(seed), rate)
        async with _recording_arrivals(supervisor, seen):
            working = asyncio.create_task(load.run())
            await asyncio.sleep(WARM_UP_S)
            began, turns, answers = time.time(), len(ledger.acked), len(ledger.latencies_s)
            await asyncio.sleep(seconds)
            reached = (len(ledger.acked) - turns) / (time.time() - began)
            load.stop.set()
            await working
            expected = {name for name, at in ledger.answered_at.items() if at >= began}
            with contextlib.suppress(TimeoutError):
                await asyncio.to_thread(wait_until, lambda: expected <= seen.keys(), _LAST_S, "the last experiences")
    latencies_ms = [(seen[name] - ledger.answered_at[name]) * 1e3 for name in expected & seen.keys()]
    return EndToEnd(
        rate=round(reached, 1),
        turns=len(ledger.acked) - turns,
        experiences=len(latencies_ms),
        missing=len(expected - seen.keys()),
        failed=len(ledger.failures),
        answer_ms=Summary.of([s * 1e3 for s in ledger.latencies_s[answers:]]).latency(),
        experience_ms=Summary.of(latencies_ms).latency(),
    )


async def _wait_until_served(http: aiohttp.ClientSession, replica: str) -> None:
    """Wait until the replica serves a version."""
    async with asyncio.timeout(_READY_S):
        while True:
            async with http.get(
                f"{replica}/v1/models", headers={"Authorization": f"Bearer {key_for(replica)}"}
            ) as response:
                if (await response.json())["data"]:
                    return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _recording_arrivals(supervisor: Supervisor, seen: dict[str, float]) -> AsyncIterator[None]:
    """Record in `seen` when the first experience of each session arrived."""
    blobs = BlobStore((supervisor.data_dir / "blobs").as_uri())
    reader = consumer(Overrides(None, {}, {}).bus_settings(supervisor.plan.bus), "bench")
    await reader.start()
    partitions = await assign_all(reader, Experience.topic)
    await reader.seek_to_end(*partitions)

    async def watch() -> None:
        while True:
            for messages in (await reader.getmany(timeout_ms=500)).values():
                for message in messages:
                    event = (await decode(record_of(message), blobs)).event
                    assert isinstance(event, Experience)
                    seen.setdefault(event.session_id, time.time())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await reader.stop()
