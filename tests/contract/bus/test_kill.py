"""Tests of kill -9 under load on the embedded broker: no acknowledged record is lost, duplicated or out of order.

Apache Kafka acknowledges from memory and relies on replicas, so that a single node does not guarantee this.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic

from tests.contract.bus.clients import administering, consuming, eventually, producing
from tests.support.buses import BrokerProcess
from tests.support.seeds import draw_seed

PARTITIONS = 3
KILLS = int(os.environ.get("KILLS", "6"))


class Load:
    """Producer that sends numbered records to one partition, a few in flight, and stores the acknowledged ones by
    offset."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.acknowledged: dict[int, int] = {}
        self.sent = 0
        self.enough = asyncio.Event()

    async def run(self, producer: AIOKafkaProducer) -> None:
        window = asyncio.Semaphore(200)

        async def note(number: int, acknowledgement: asyncio.Future[object]) -> None:
            metadata = await acknowledgement
            self.acknowledged[number] = metadata.offset  # type: ignore[attr-defined]
            window.release()

        async with asyncio.TaskGroup() as group:
            while not self.enough.is_set():
                await window.acquire()
                value = b"%d " % self.sent + bytes(300)
                group.create_task(note(self.sent, await producer.send("ledger", value, partition=self.partition)))
                self.sent += 1


async def _follow(address: str, seen: dict[int, list[int]], stopped: asyncio.Event) -> None:
    """Read through the kills, and store the offsets of every record in `seen`."""
    async with consuming(address, metadata_max_age_ms=1_000) as consumer:
        consumer.assign([TopicPartition("ledger", number) for number in range(PARTITIONS)])
        while not stopped.is_set():
            for partition, records in (await consumer.getmany(timeout_ms=100)).items():
                seen[partition.partition] += [int(record.value.split()[0]) for record in records]
        for partition, end in (await consumer.end_offsets(consumer.assignment())).items():
            async with asyncio.timeout(20):
                while await consumer.position(partition) < end:
                    records = (await consumer.getmany(partition, timeout_ms=100)).get(partition, [])
                    seen[partition.partition] += [int(record.value.split()[0]) for record in records]


@pytest.mark.long
async def test_kill_under_load(tmp_path: Path) -> None:
    seed = draw_seed()
    print(f"KILLS={KILLS}")
    chance = random.Random(seed)
    broker = BrokerProcess(tmp_path)
    broker.start()
    try:
        async with administering(broker.address) as admin:
            await admin.create_topics([NewTopic("ledger", PARTITIONS, 1)])
        loads = [Load(number) for number in range(PARTITIONS)]
        seen: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
        stopped = asyncio.Event()
        options = {"request_timeout_ms": 10_000, "retry_backoff_ms": 50, "metadata_max_age_ms": 1_000}
        async with producing(broker.address, **options) as producer, asyncio.TaskGroup() as group:
            running = [group.create_task(load.run(producer)) for load in loads]
            group.create_task(_follow(broker.address, seen, stopped))
            for _ in range(KILLS):
                before = _acknowledged(loads)
                await asyncio.sleep(chance.uniform(0.1, 0.8))
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
                await eventually(partial(_more_than, loads, before))
            for load in loads:
                load.enough.set()
            await asyncio.wait(running)
            stopped.set()
        for load in loads:
            _check(load, seen[load.partition])
        print(f"{_acknowledged(loads)} acknowledged records over {KILLS} kills: 0 lost, 0 doubled, 0 out of order")
        assert _acknowledged(loads) > 200
    finally:
        broker.stop()


def _acknowledged(loads: list[Load]) -> int:
    return sum(len(load.acknowledged) for load in loads)


async def _more_than(loads: list[Load], before: int) -> bool:
    return _acknowledged(loads) > before


def _check(load: Load, log: list[int]) -> None:
    assert len(log) == len(set(log)), "doubled"
    assert log == sorted(log), "out of order"
    assert load.acknowledged.keys() <= set(log), "lost"
    assert all(log[offset] == number for number, offset in load.acknowledged.items()), "not where it was said to be"
