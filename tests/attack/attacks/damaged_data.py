"""Damaged records on the bus, and flipped bits in the files of the broker and of the gateway's spool."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic

from headrace_gateway.capture.spool import Spool, Spooled
from headrace_schemas import DeadLetter, Experience, Trajectory, Turn
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.blobs import BlobRef
from tests.attack.program import attack
from tests.attack.stacks import Place, SmallStack, small_stack
from tests.support.servers import BrokerProcess
from tests.support.turns import ask, end, user
from tests.support.wire_client import administering
from tests.system.program import Line, at_most, none_of

SESSIONS = 120
BAD = 60
Bad = Callable[[Turn, SmallStack, random.Random], tuple[bytes | None, tuple[tuple[str, bytes], ...], str]]


def _cut(turn: Turn, _stack: SmallStack, rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    value = turn.to_json()
    return value[: rng.randrange(1, len(value) - 1)], (), "invalid_json"


def _flipped(turn: Turn, _stack: SmallStack, rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    value = bytearray(turn.to_json())
    value[rng.choice([0, len(value) - 1])] ^= 0x10
    return bytes(value), (), "invalid_json"


def _empty(_turn: Turn, _stack: SmallStack, _rng: random.Random) -> tuple[None, tuple[tuple[str, bytes], ...], str]:
    return None, (), "empty_value"


def _no_usage(turn: Turn, _stack: SmallStack, _rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    return turn.to_json().replace(b'"usage"', b'"usages"'), (), "invalid_event"


def _no_reference(
    turn: Turn, _stack: SmallStack, _rng: random.Random
) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    return turn.to_json(), (("ce_dataref", b"file:///nowhere"),), "invalid_blob_reference"


def _missing(turn: Turn, stack: SmallStack, _rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    ref = stack.blobs.ref(turn.to_json())
    return ref.model_dump_json().encode(), Envelope.of(turn, "x", dataref=ref.uri).headers(), "missing_blob"


def _corrupt(turn: Turn, stack: SmallStack, rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    ref: BlobRef = stack.blobs.put(turn.to_json())
    path = Path(ref.uri.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return ref.model_dump_json().encode(), Envelope.of(turn, "x", dataref=ref.uri).headers(), "corrupt_blob"


KINDS: tuple[Bad, ...] = (_cut, _flipped, _empty, _no_usage, _no_reference, _missing, _corrupt)


@attack("damaged records, missing blobs and wrong headers among good records")
async def bad_records(folder: Path, rng: random.Random) -> list[Line]:
    """Send bad records among good ones: each is dead-lettered with its offset, and all others are processed."""
    async with small_stack(folder) as stack:
        collector, scorer = stack.service("collector"), stack.service("scorer", SCORER__REWARD_WAIT_S=1)
        for service in (collector, scorer):
            service.start()
        good, bad = await _send(stack, rng)
        letters = await stack.until(DeadLetter, lambda events: len(events) >= len(bad))
        experiences = await stack.until(Experience, lambda events: len(_turns(events)) >= len(good), 90)
        closed = await stack.events(Trajectory)
        origins = [(letter.source_topic, letter.source_partition, letter.source_offset) for letter in letters]
        reasons = {origin: letter.reason for origin, letter in zip(origins, letters, strict=True)}
        wrong = [origin for origin, reason in bad.items() if reasons.get(origin) != reason]
        reached = _turns(experiences)
        sampled = _sampled(closed)
        changed = [turn for turn, tokens in sampled.items() if tokens != good.get(turn)]
        ended = [service.name for service in (collector, scorer) if not service.running()]
        return [
            none_of("services that ended", len(ended), 2),
            none_of("bad records without the dead letter of their place and reason", len(wrong), len(bad)),
            none_of("dead letters that were written twice, or for a good record", len(origins) - len(bad), len(bad)),
            none_of("good turns that did not reach `experiences`", len(good.keys() - reached), len(good)),
            none_of("turns that were passed on with other tokens than were sampled", len(changed), len(good)),
        ]


async def _send(stack: SmallStack, rng: random.Random) -> tuple[dict[str, tuple[int, ...]], dict[Place, str]]:
    """Send good turns mixed with bad records.

    Returns:
        The sampled tokens of each good turn, and the expected dead-letter reason for the place of each bad record.
    """
    good: dict[str, tuple[int, ...]] = {}
    bad: dict[Place, str] = {}
    work = ["good"] * SESSIONS + ["bad"] * BAD
    rng.shuffle(work)
    for number, kind in enumerate(work):
        turn = ask([user(f"question {number}")], session=f"s{number}", at=number)
        if kind == "good":
            good[turn.turn_id] = turn.choices[0].token_ids
            await stack.send(turn)
            await stack.send(end(f"s{number}", at=number + 10))
        else:
            value, headers, reason = rng.choice(KINDS)(turn, stack, rng)
            bad[await stack.send_raw("turns", turn.session_key, value, headers)] = reason
    return good, bad


def _turns(experiences: list[Experience]) -> set[str]:
    return {turn for experience in experiences for turn in experience.turn_ids}


def _sampled(closed: list[Trajectory]) -> dict[str, tuple[int, ...]]:
    """Return the sampled tokens of each turn, as the trajectories contain them."""
    return {
        span.turn_id: branch.token_ids[span.start : span.stop]
        for trajectory in closed
        for branch in trajectory.branches
        for span in branch.spans
    }


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


@attack("a flipped byte in the broker's files costs one record at most")
async def flipped_bytes_broker(folder: Path, rng: random.Random) -> list[Line]:
    """Flip bytes in the files that a kill -9 leaves after real traffic, each round on a fresh copy.

    In each round a real broker starts on the damaged files and real consumers read everything. Some rounds flip bytes
    of the checksum files instead.
    """
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
    for path, start, stop in chosen:
        data = bytearray(path.read_bytes())
        data[rng.randrange(start, stop)] ^= rng.randrange(1, 256)
        path.write_bytes(data)
    return len(chosen)


_FLIPS = 500
_EVENTS = 120
_RESERVE_BYTES = 1 << 17


@attack("flipped bytes in the spool of a gateway that was killed")
async def spool_flips(folder: Path, rng: random.Random) -> list[Line]:
    intact = folder / "whole"
    written = [_event(number, rng) for number in range(_EVENTS)]
    count = rng.randrange(10, 30)
    async with Spool(intact, 1 << 30, _RESERVE_BYTES) as spool:
        for at in range(0, _EVENTS, 10):
            await spool.append(written[at : at + 10])
        await spool.remove(await spool.oldest(count))
    silent = crashed = untold = worst = reported = 0
    for trial in range(_FLIPS):
        flipped = folder / f"flip-{trial}"
        shutil.copytree(intact, flipped)
        _flip_bit(flipped, rng)
        try:
            records = await _read(flipped)
        except Exception:  # noqa: BLE001 (whatever it is, that gateway would not start)
            crashed += 1
            continue
        finally:
            shutil.rmtree(flipped)
        written_by_value = {event.value: event for event in written}
        good = [record for record in records if not record.damage]
        silent += sum(
            record.value not in written_by_value or written_by_value[record.value].topic != record.topic
            for record in good
        )
        lost = len({event.value for event in written[count:]} - {record.value for record in good})
        damaged = sum(bool(record.damage) for record in records)
        worst, reported = max(worst, lost), reported + damaged
        untold += max(0, lost - damaged)
    return [
        none_of("flips that changed an event unseen", silent, _FLIPS),
        none_of("flips after which the gateway does not start", crashed, _FLIPS),
        at_most("records lost to one flip", worst, 1),
        none_of("losses without a dead letter", untold, _FLIPS),
        Line("records given up with their place", str(reported), f"at most {_FLIPS}, and some", 0 < reported <= _FLIPS),
    ]


async def _read(folder: Path) -> list[Spooled]:
    async with Spool(folder, 1 << 30, _RESERVE_BYTES) as spool:
        return await spool.oldest(10 * _EVENTS)


def _event(number: int, rng: random.Random) -> Spooled:
    text = rng.randbytes(rng.randrange(20, 900)).hex()
    return Spooled(rng.choice(["turns", "feedback"]), b'{"number":%d,"text":"%s"}' % (number, text.encode()))


def _flip_bit(folder: Path, rng: random.Random) -> None:
    """Flip one bit: with probability one half in the bytes of records, otherwise anywhere in any file."""
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    segments = [path for path in files if path.suffix == ".spool" and any(path.read_bytes()[:64])]
    path = rng.choice(segments if rng.random() < 0.5 else files)
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0")) if path in segments else len(data)
    data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
