"""Scenarios of the stream host's behaviour. `FaustHost` is the real host and passes records to a `Handler`.

On real buses the host runs on Faust, on the simulated bus on a substitute. Members stop as processes do on a signal;
other tests kill processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from aiokafka import AIOKafkaProducer, TopicPartition

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.wire import Record
from headrace_runtime.stream.processor import Processor
from headrace_runtime.stream.stream_service import FaustHost
from tests.contract.used.grounds import Ground, Scenario, consuming, eventually, everything, producing, send

_COMMITS_WITHIN_S = 2.5
"""Some commit intervals of the host, after which every pending commit has been made."""


class Handler:
    """Handler in place of a `Processor`, which records its input. While it is closed, no record finishes."""

    ends: Any = None

    def __init__(self, refuses: bytes | None = None) -> None:
        self.refuses = refuses
        self.starts: Mapping[tuple[str, int], int] = {}
        self.seen: list[Record] = []
        self.handled: list[Record] = []
        self.open = asyncio.Event()
        self.open.set()

    async def recover(self, starts: Mapping[tuple[str, int], int]) -> None:
        self.starts = starts

    async def process(self, records: Sequence[Record]) -> None:
        self.seen += records
        await self.open.wait()
        for record in records:
            if record.value is not None and record.value == self.refuses:
                raise Unavailable("it is refused")
            self.handled.append(record)

    async def prune(self) -> None:
        """Forget no state, because there is none."""


class Member:
    """Member of a consumer group, with its own host and handler."""

    def __init__(
        self, ground: Ground, group: str, *topics: str, batch_max: int = 1, refuses: bytes | None = None
    ) -> None:
        self.handler = Handler(refuses)
        self._ground = ground
        self._topics = topics
        self._group = group
        self._batch_max = batch_max
        self._host: FaustHost | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._ground.spawn(self._run)

    async def stop(self) -> None:
        """Stop the host as SIGTERM does."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def ended(self) -> BaseException | None:
        """Wait until the host ends by itself. Return the exception."""
        assert self._task is not None
        await asyncio.wait([self._task], timeout=60)
        return self._task.exception()

    def waiting(self) -> list[TopicPartition]:
        """Return the positions of the records that were delivered and not begun."""
        if self._host is None:
            return []
        queued = [event.message for event in cast(Any, self._host._queue)._queue]
        return [TopicPartition(message.topic, message.partition) for message in queued]

    async def _run(self) -> None:
        self._host = FaustHost(
            cast(Processor, self.handler),
            self._topics,
            self._ground.bus,
            group=self._group,
            folder=self._ground.folder / f"{self._group}-{id(self)}",
            batch_max=self._batch_max,
        )
        await self._host.run()


@contextlib.asynccontextmanager
async def _started(*members: Member) -> AsyncIterator[None]:
    for member in members:
        member.start()
    try:
        yield
    finally:
        for member in members:
            await member.stop()


def _group(ground: Ground) -> str:
    """Return a group name that no other scenario uses."""
    return f"used-{ground.draw.getrandbits(64):016x}"


async def _starts(ground: Ground, group: str, *topics: str) -> Mapping[tuple[str, int], int]:
    """Return the committed offsets of `group`, as the host requests them before its start."""
    offset_reader = Offsets(ground.bus, group)
    await offset_reader.start()
    try:
        return await offset_reader.starts(topics)
    finally:
        await offset_reader.stop()


async def _ends(ground: Ground, *topics: str) -> Mapping[tuple[str, int], int]:
    offset_reader = Offsets(ground.bus, None, "used")
    await offset_reader.start()
    try:
        return {(topic, number): end for topic in topics for number, end in (await offset_reader.ends(topic)).items()}
    finally:
        await offset_reader.stop()


def _offsets_of(records: Sequence[Record]) -> dict[tuple[str, int], list[int]]:
    offsets: dict[tuple[str, int], list[int]] = {}
    for record in records:
        offsets.setdefault((record.topic, record.partition), []).append(record.offset)
    return offsets


async def restart_goes_on_where_it_acknowledged(ground: Ground) -> None:
    """One agent reads two topics. Only records that were not acknowledged before a stop are handled again, in order."""
    topics = [await ground.create(2), await ground.create(2)]
    group = _group(ground)
    async with producing(ground) as producer:
        for topic in topics:
            for partition in range(2):
                await send(producer, topic, [b"%d:%d" % (partition, number) for number in range(10)], partition)
        odd = await producer.send(topics[0], None, b"", 0, headers=[("a", b"1"), ("a", b""), ("b", b"2")])
        await odd
        await send(producer, topics[0], [b"refused", b"behind it"], 0)
        first = Member(ground, group, *topics, refuses=b"refused")
        first.start()
        error = await first.ended()
        assert isinstance(error, BaseExceptionGroup)
        assert error.subgroup(Unavailable) is not None
        assert (await _starts(ground, group, *topics))[topics[0], 0] == 11, "up to what was refused"
        await send(producer, topics[1], [b"later"], 1)
    assert set(first.handler.starts.values()) == {0}
    second = Member(ground, group, *topics)
    async with _started(second):
        ends = await _ends(ground, *topics)
        sent = sum(ends.values())
        await eventually(lambda: len(first.handler.handled) + len(second.handler.handled) >= sent, "all is handled")
    handled = [*first.handler.handled, *second.handler.handled]
    assert _offsets_of(handled) == {place: list(range(end)) for place, end in ends.items()}, "each once, in order"
    assert second.handler.starts[topics[0], 0] == 11
    assert await _starts(ground, group, *topics) == ends, "a clean stop commits what was acknowledged"
    on_the_bus = [record for topic in topics for records in await everything(ground, topic) for record in records]
    assert sorted(handled, key=repr) == sorted(on_the_bus, key=repr), "a host gets what a consumer gets"


async def committed_is_seen_by_others(ground: Ground) -> None:
    """Committed offsets are visible to a manually assigned consumer of the same group, and to no other group."""
    topic, group = await ground.create(1), _group(ground)
    partition = TopicPartition(topic, 0)
    member = Member(ground, group, topic)
    async with producing(ground) as producer, consuming(ground, group_id=group) as asking:
        assert await asking.committed(partition) is None
        await send(producer, topic, [b"1", b"2", b"3"])
        async with _started(member):
            await eventually(lambda: len(member.handler.handled) == 3, "all is handled")

            async def committed() -> bool:
                return bool(await asking.committed(partition) == 3)

            await eventually(committed, "it commits while it runs")
        await send(producer, topic, [b"4"])
        asking.assign([partition])
        assert await asking.position(partition) == 3
        async with consuming(ground, group_id=f"{group}-other") as stranger:
            assert await stranger.committed(partition) is None
            stranger.assign([partition])
            assert await stranger.position(partition) == 0


async def members_share_and_survivors_take_over(ground: Ground) -> None:
    """A late acknowledgement of a former owner has no effect, so the new owner handles the record again.

    A revoked partition may redeliver uncommitted records, so a record may arrive more than once.
    """
    topic, group = await ground.create(4), _group(ground)
    old, new = (Member(ground, group, topic, batch_max=50) for _ in range(2))
    async with producing(ground) as producer, contextlib.AsyncExitStack() as stack:
        await _send_to_each(producer, topic, b"first")
        old.handler.open.clear()
        old.start()
        stack.push_async_callback(old.stop)
        await eventually(lambda: len(_assigned_partitions(old)) == 4, "the first member is given everything")
        new.handler.open.clear()
        async with _started(new):
            await eventually(lambda: len(_assigned_partitions(new)) == 2, "the second member is given its half")
            moved = _assigned_partitions(new)
            old.handler.open.set()
            await eventually(lambda: len(_handled(old)) == 4, "the former owner finishes, late")
            await asyncio.sleep(_COMMITS_WITHIN_S)
            committed = await _starts(ground, group, topic)
            expected = {(topic, number): int(number not in moved) for number in range(4)}
            assert committed == expected, f"{moved} moved, committed are {committed}"
            new.handler.open.set()
            await eventually(lambda: _handled(new) == moved, "the new owner handles what it got")
            await old.stop()
            await _send_to_each(producer, topic, b"second")
            await eventually(lambda: len(_handled(new, b"second")) == 4, "the survivor takes over")

            async def all_committed() -> bool:
                return await _starts(ground, group, topic) == await _ends(ground, topic)

            await eventually(all_committed, "what came again is committed, too")
        assert not _handled(old, b"second")


async def _send_to_each(producer: AIOKafkaProducer, topic: str, value: bytes) -> None:
    for partition in range(4):
        await send(producer, topic, [value], partition)


def _assigned_partitions(member: Member) -> set[int]:
    """Return the partitions of the records delivered up to now."""
    return {partition.partition for partition in member.waiting()} | {
        record.partition for record in member.handler.seen
    }


def _handled(member: Member, value: bytes = b"first") -> set[int]:
    return {record.partition for record in member.handler.handled if record.value == value}


HOSTING: tuple[Scenario, ...] = (
    restart_goes_on_where_it_acknowledged,
    committed_is_seen_by_others,
    members_share_and_survivors_take_over,
)


async def hosts_beside_each_other(ground: Ground) -> None:
    """Run all scenarios above at the same time with different groups, because real members take seconds to join and
    leave."""
    async with asyncio.TaskGroup() as group:
        for scenario in HOSTING:
            group.create_task(scenario(ground))
