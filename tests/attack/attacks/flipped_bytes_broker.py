"""Flipped bytes in the files of a stopped broker: 20 rounds with 25 bytes each, every round on a fresh copy.

The files are those that a kill -9 leaves after real traffic: several topics, transactions and committed offsets, partly
still in SQLite's log. In each round a real broker starts on the damaged files and real consumers read everything. Some
rounds flip bytes of the checksum files instead.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic

from tests.support.servers import BrokerProcess
from tests.support.wire_client import administering
from tests.system.program import Line, none_of

TITLE = "a flipped byte in the broker's files costs one record at most"
ROUNDS, FLIPS = 20, 25
TOPICS = {"plain": 3, "keyed": 1, "transacted": 1}
GROUP = "readers"
# What one flipped byte is put right in: a page, a frame of the log, and the checksums of one of them.
PAGE_BYTES, FRAME_BYTES, SUMS_BYTES, ENTRY_BYTES = 4096, 4120, 8, 36
LOG_HEADER_BYTES = 32
Records = dict[tuple[str, int, int], tuple[bytes | None, bytes | None]]


class Content(NamedTuple):
    """Content that clients can read: the records by topic, partition and offset, and the committed offsets."""

    records: Records
    committed: dict[TopicPartition, int | None]


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    origin, original = await _traffic(folder / "origin", rng)
    changed = lost = moved = failed_starts = flips = mended = 0
    for number in range(ROUNDS):
        copy = folder / f"round-{number}"
        shutil.copytree(origin, copy)
        flips += _flip(copy / "broker", rng, checksums=number % 5 == 4)
        broker = BrokerProcess(copy)
        try:
            broker.start()
            content = await _content(broker.address)
        except (TimeoutError, OSError, RuntimeError, AssertionError):
            failed_starts += 1
            continue
        finally:
            broker.stop()
        lost += len(original.records.keys() - content.records.keys())
        changed += sum(original.records.get(key) != value for key, value in content.records.items())
        moved += content.committed != original.committed
        mended += (copy / "broker.log").read_text().count('"event": "file_mended"')
        shutil.rmtree(copy)
    return [
        none_of("flips that changed a record in silence", changed, flips),
        none_of("flips that lost a record", lost, flips),
        none_of("rounds with other committed offsets", moved, ROUNDS),
        none_of("rounds in which the broker did not serve", failed_starts, ROUNDS),
        Line("rounds in which the damage was seen and named", f"{mended}", f"{ROUNDS}", mended == ROUNDS),
    ]


async def _traffic(folder: Path, rng: random.Random) -> tuple[Path, Content]:
    """Run a broker under traffic and kill it with SIGKILL. Return the folder of its files and the content."""
    broker = BrokerProcess(folder)
    broker.start()
    try:
        async with administering(broker.address) as admin:
            await admin.create_topics([NewTopic(name, partitions, 1) for name, partitions in TOPICS.items()])
        await _produce(broker.address, rng, 300)
        broker.stop()
        broker.start()  # what came before is in the file now, what comes next stays in the log
        await _produce(broker.address, rng, 150)
        await _commit(broker.address)
        content = await _content(broker.address)
        broker.kill()
    finally:
        broker.stop()
    return folder, content


async def _produce(address: str, rng: random.Random, count: int) -> None:
    plain = AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True)
    transacted = AIOKafkaProducer(bootstrap_servers=address, transactional_id="attack")
    await plain.start()
    await transacted.start()
    for number in range(count):
        value = rng.randbytes(rng.choice((20, 300, 3_000, 12_000)))
        await plain.send_and_wait("plain", value, partition=number % 3)
        await plain.send("keyed", value[:500], key=b"%d" % (number % 20))
        if number % 10 == 0:
            await transacted.begin_transaction()
            await transacted.send("transacted", value)
            await (transacted.abort_transaction() if number % 30 == 0 else transacted.commit_transaction())
    await plain.stop()
    await transacted.stop()


async def _commit(address: str) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=address, group_id=GROUP, enable_auto_commit=False)
    await consumer.start()
    consumer.assign(_partitions())
    await consumer.commit({partition: 7 + partition.partition for partition in _partitions()})
    await consumer.stop()


async def _content(address: str) -> Content:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=address, group_id=GROUP, enable_auto_commit=False, isolation_level="read_committed"
    )
    records: Records = {}
    async with asyncio.timeout(60):
        await consumer.start()
        try:
            consumer.assign(_partitions())
            committed = {partition: await consumer.committed(partition) for partition in _partitions()}
            ends = await consumer.end_offsets(_partitions())
            await consumer.seek_to_beginning(*_partitions())
            while any([await consumer.position(partition) < end for partition, end in ends.items()]):
                for partition, batch in (await consumer.getmany(timeout_ms=200)).items():
                    for record in batch:
                        records[partition.topic, partition.partition, record.offset] = (record.key, record.value)
        finally:
            await consumer.stop()
    return Content(records, committed)


def _partitions() -> list[TopicPartition]:
    return [TopicPartition(name, number) for name, count in TOPICS.items() for number in range(count)]


def _flip(folder: Path, rng: random.Random, *, checksums: bool) -> int:
    """Flip bytes, each in a different page: in the checksum files if `checksums`, otherwise anywhere in the data."""
    names = ("broker.sums", "broker.frames") if checksums else ("broker.sqlite", "broker.sqlite-wal")
    sizes = {folder / name: (folder / name).stat().st_size for name in names}
    unit = {"broker.sqlite-wal": FRAME_BYTES, "broker.sums": SUMS_BYTES, "broker.frames": ENTRY_BYTES}
    ranges = []
    for path, size in sizes.items():
        starts = [*range(LOG_HEADER_BYTES if path.name.endswith("-wal") else 0, size, unit.get(path.name, PAGE_BYTES))]
        ranges += [(path, at, min(at + unit.get(path.name, PAGE_BYTES), size)) for at in starts]
        ranges += [(path, 0, LOG_HEADER_BYTES)] if starts[0] else []
    chosen = rng.sample(ranges, min(FLIPS, len(ranges)))
    for path, start, end in chosen:
        data = bytearray(path.read_bytes())
        data[rng.randrange(start, end)] ^= rng.randrange(1, 256)
        path.write_bytes(data)
    return len(chosen)
