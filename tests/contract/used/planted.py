"""Faults of a bus, planted in the simulated one: the suite has to find them."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from aiokafka import TopicPartition

from headrace_runtime.kafka.wire import RawHeaders, Record
from headrace_runtime.stream.faust_host import FaustHost, _record
from tests.contract.used import hosting, reading, sending
from tests.contract.used.ground import Ground, Scenario, eventually, producing, send
from tests.simulation.bus import Bus, Group, Member
from tests.simulation.clients import Consumer
from tests.simulation.faust_app import App, Event

_APPEND, _COMMIT, _FETCH, _ENDS = Bus.append, Group.commit, Consumer._fetch, Consumer.end_offsets


@dataclass(frozen=True, slots=True)
class Planted:
    """Replaced name, its replacement, and a scenario that must fail."""

    name: str
    substitute: object
    caught_by: Scenario

    @contextlib.contextmanager
    def plant(self) -> Iterator[None]:
        with mock.patch(f"tests.simulation.{self.name}", self.substitute):
            yield


def _swapping(bus: Bus, partition: TopicPartition, *fields: Any) -> Record:
    """Now and then a record overtakes the one before it."""
    record = _APPEND(bus, partition, *fields)
    log = bus.logs[partition.topic][partition.partition]
    if len(log) > 1 and bus.draw.random() < 0.1:
        log[-2:] = [replace(log[-1], offset=log[-2].offset), replace(log[-2], offset=log[-1].offset)]
    return record


def _without_null(
    bus: Bus, partition: TopicPartition, key: bytes | None, value: bytes | None, headers: RawHeaders, by: str
) -> Record:
    return _APPEND(bus, partition, key, value or b"", headers, by)


def _one_of_each_name(
    bus: Bus, partition: TopicPartition, key: bytes | None, value: bytes | None, headers: RawHeaders, by: str
) -> Record:
    return _APPEND(bus, partition, key, value, tuple(dict(headers).items()), by)


def _commit_too_far(group: Group, member: Member, partition: TopicPartition, offset: int) -> None:
    _COMMIT(group, member, partition, offset + 1)


def _commit_too_little(group: Group, member: Member, partition: TopicPartition, offset: int) -> None:
    _COMMIT(group, member, partition, offset - 1)


def _without_fences(app: App, event: Event) -> None:
    """Accept acknowledgements of former owners."""
    app._group.committed[event.topic_partition] = event.message.offset + 1


def _leave_unnoticed(group: Group, member: Member) -> None:
    group.members.pop(member, None)


def _without_bound(consumer: Consumer, partitions: Any, _records_max: int) -> Any:
    return _FETCH(consumer, partitions, 1000)


async def _late_ends(consumer: Consumer, partitions: Any) -> dict[TopicPartition, int]:
    """Hide the last acknowledged record."""
    return {partition: max(0, end - 1) for partition, end in (await _ENDS(consumer, partitions)).items()}


async def acknowledge_backwards(host: FaustHost) -> None:
    """A host that acknowledges a batch from its end."""
    batches: AsyncIterator[list[Any]] = host._batches()
    async for events in batches:
        await host._processor.process([_record(event) for event in events])
        for event in reversed(events):
            event.ack()


async def a_full_batch(ground: Ground) -> None:
    """A host that gets several records of one partition at once. Raises its exception."""
    topic = await ground.create(1)
    member = hosting.Member(ground, "group", topic, batch_max=20)
    member.handler.open.clear()
    async with producing(ground) as producer:
        await send(producer, topic, [b"%d" % number for number in range(10)])
    member.start()
    await eventually(lambda: len(member.waiting()) + len(member.handler.seen) == 10, "it is given everything")
    member.handler.open.set()
    error = await member.ended()
    assert error is not None
    raise error


PLANTED: Mapping[str, Planted] = {
    "records overtake": Planted("bus.Bus.append", _swapping, sending.order_within_a_partition),
    "null is empty": Planted("bus.Bus.append", _without_null, sending.null_is_not_empty),
    "a header comes once": Planted("bus.Bus.append", _one_of_each_name, sending.headers_come_back),
    "another hash": Planted(
        "bus.Bus.partition_of",
        lambda bus, topic, key: zlib.crc32(key) % len(bus.logs[topic]),
        sending.keys_choose_partitions,
    ),
    "acknowledged before it can be read": Planted(
        "clients.Consumer.end_offsets", _late_ends, sending.acknowledged_is_readable
    ),
    "no bound on a poll": Planted("clients.Consumer._fetch", _without_bound, reading.some_at_a_time),
    "a pause does nothing": Planted("clients.Consumer.pause", lambda *_: None, reading.paused_places_wait),
    "assigning keeps positions": Planted(
        "clients.Consumer.assign",
        lambda consumer, partitions: consumer._next.update(
            {partition: consumer._next.get(partition, 0) for partition in partitions}
        ),
        reading.assigning_forgets,
    ),
    "commits one too far": Planted("bus.Group.commit", _commit_too_far, hosting.restart_goes_on_where_it_acknowledged),
    "commits one too little": Planted(
        "bus.Group.commit", _commit_too_little, hosting.restart_goes_on_where_it_acknowledged
    ),
    "no commits": Planted("bus.Group.commit", lambda *_: None, hosting.committed_is_seen_by_others),
    "former owners commit": Planted(
        "faust_app.App.acknowledge", _without_fences, hosting.members_share_and_survivors_take_over
    ),
    "nobody takes over": Planted("bus.Group.leave", _leave_unnoticed, hosting.members_share_and_survivors_take_over),
}
"""By name."""
