"""Rates of one bus with the settings of the services, and the latency from the answered call to the experience.

Records are real turns, idempotent, acknowledged by all replicas. For the latency, all services that `headrace up`
starts run: users call the gateway at a given rate, a tiny model answers, and each session ends with feedback
immediately after its last answer. The latency runs from the end of that answer until a consumer of `experiences` has
decoded the event. The trainer trains on the same two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks._run_processes import Summary
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Turn
from headrace_schemas.http.stack_access import key_for
from tests.chaos.balancer import Balancer
from tests.chaos.client import Client, ClientLedger, Load
from tests.support import tiny_model
from tests.support.processes import free_port, wait_until
from tests.support.turns import ask, user

PARTITIONS = 4
SENDERS = 64
"""Number of records in flight, with concurrent senders."""
BATCH = 200
"""Number of records per bulk call, as when a gateway drains its spool."""
PACED_PER_S = 100
QUESTION = "Who sent the mail about the meeting on Monday at 10:30, and what did they want to know? " * 4


@dataclass
class Rates:
    """Measured rates, one value per round. The counts are the records of each round in each mode."""

    alone_count: int
    concurrent_count: int
    bulk_count: int
    paced_s: float
    per_s: dict[str, list[float]] = field(default_factory=dict)
    ms: dict[str, list[float]] = field(default_factory=dict)
    bytes_per_record: int = 0

    def rate(self, name: str, records: int, began: float) -> None:
        self.per_s.setdefault(name, []).append(records / (time.perf_counter() - began))

    def result(self) -> dict[str, object]:
        """Return the best round of each rate, which is the least disturbed, its median, and quantiles of all
        latencies."""
        rates = {name: Summary.of(values).rate() for name, values in self.per_s.items()}
        return {"per_s": rates, "ms": {name: Summary.of(values).latency() for name, values in self.ms.items()}}


@dataclass
class Bus:
    """An open bus with a topic of its own. `open_bus` creates it."""

    settings: BusSettings
    producer: EventProducer
    blobs: BlobStore
    topic: str
    rates: Rates

    async def round(self) -> None:
        """Measure all rates once."""
        records = await self._records(max(self.rates.alone_count, self.rates.concurrent_count, self.rates.bulk_count))
        await self._one_by_one(records[: self.rates.alone_count])
        await self._many_at_once(records[: self.rates.concurrent_count])
        await self._in_bulk(records[: self.rates.bulk_count])
        await self._consume("consumed", decoding=False)
        await self._consume("consumed and decoded", decoding=True)
        await self._to_a_waiting_reader(records)

    async def _records(self, count: int) -> list[Outgoing]:
        records = [await self.producer.encode(turn(number)) for number in range(count)]
        self.rates.bytes_per_record = len(records[0].value or b"")
        return [replace(record, topic=self.topic) for record in records]

    async def _timed(self, name: str, records: Sequence[Outgoing]) -> None:
        began = time.perf_counter()
        await self.producer.send_raw(records)
        self.rates.ms.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    async def _one_by_one(self, records: Sequence[Outgoing]) -> None:
        began = time.perf_counter()
        for record in records:
            await self._timed("published alone", [record])
        self.rates.rate("published alone", len(records), began)

    async def _many_at_once(self, records: Sequence[Outgoing]) -> None:
        queue = iter(records)

        async def sender() -> None:
            for record in queue:
                await self._timed("published by many", [record])

        began = time.perf_counter()
        await asyncio.gather(*(sender() for _ in range(SENDERS)))
        self.rates.rate("published by many", len(records), began)

    async def _in_bulk(self, records: Sequence[Outgoing]) -> None:
        began = time.perf_counter()
        for start in range(0, len(records), BATCH):
            await self.producer.send_raw(records[start : start + BATCH])
        self.rates.rate("published in bulk", len(records), began)

    async def _consume(self, name: str, *, decoding: bool) -> None:
        """Consume all records on the topic, from its beginning."""
        reader = consumer(self.settings, "bench")
        await reader.start()
        try:
            partitions = await assign_all(reader, self.topic)
            await reader.seek_to_beginning(*partitions)
            ends = await reader.end_offsets(partitions)
            total, count, began = sum(ends.values()), 0, time.perf_counter()
            while count < total:
                for messages in (await reader.getmany(timeout_ms=500)).values():
                    count += len(messages)
                    for message in messages if decoding else ():
                        await decode(record_of(message), self.blobs, topic=Turn.topic)
            self.rates.rate(name, total, began)
        finally:
            await reader.stop()

    async def _to_a_waiting_reader(self, records: Sequence[Outgoing]) -> None:
        """Measure the latency from the call of `send` until a consumer has decoded the record, with a pause between
        records.
        """
        sent: dict[str, float] = {}
        reader = consumer(self.settings, "bench")
        await reader.start()
        try:
            await reader.seek_to_end(*await assign_all(reader, self.topic))
            paced_records = records[: int(PACED_PER_S * self.rates.paced_s)]
            sending = asyncio.create_task(self._paced(paced_records, sent))
            received = 0
            async with asyncio.timeout(60):
                while received < len(paced_records):
                    for messages in (await reader.getmany(timeout_ms=500)).values():
                        for message in messages:
                            event = (await decode(record_of(message), self.blobs, topic=Turn.topic)).event
                            waited_s = time.perf_counter() - sent[event.event_id]
                            self.rates.ms.setdefault("to a waiting reader", []).append(waited_s * 1e3)
                            received += 1
            await sending
        finally:
            await reader.stop()

    async def _paced(self, records: Sequence[Outgoing], sent: dict[str, float]) -> None:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, record in enumerate(records):
                await asyncio.sleep(max(0.0, began + number / PACED_PER_S - time.perf_counter()))
                sent[dict(record.headers)["ce_id"].decode()] = time.perf_counter()
                group.create_task(self.producer.send_raw([record]))


@asynccontextmanager
async def open_bus(address: str, blobs: BlobStore, rates: Rates) -> AsyncIterator[Bus]:
    """Create a topic on the bus, and open a producer of the kind that services use."""
    settings = BusSettings(address=address)
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    producer = EventProducer(settings, "bench", blobs)
    try:
        await admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
        await producer.start()
        yield Bus(settings, producer, blobs, topic, rates)
    finally:
        await producer.stop()
        await admin.close()


def turn(number: int) -> Turn:
    """Return a model call of about 400 prompt tokens and 64 new tokens with their logprobs."""
    return ask([user(QUESTION)], f"answer {number} " + "x" * 50, session=f"bench-{number}")


MODEL = "bench"
WARM_UP_S = 8.0
_READY_S = 300.0
_LAST_S = 15.0
"""Time limit for the last experiences, in seconds."""
REWARDS = "def short(trajectory):\n    return 1.0 if len(trajectory.final_answer) < 12 else 0.0\n"


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Results of the end-to-end measurement after the warm-up."""

    rate: float
    turns: int
    experiences: int
    missing: int
    failed: int
    answer_ms: dict[str, float]
    experience_ms: dict[str, float]


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
