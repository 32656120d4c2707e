"""Tests of the bus behaviour that our runtime uses, on each bus, so that the simulated bus behaves like the real ones.

Faults injected into the simulated bus must make a scenario fail.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiokafka import TopicPartition

from headrace_runtime.errors import SettingError
from headrace_runtime.kafka.topics import check_login
from headrace_runtime.kafka.wire import RawHeaders, Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.stream.stream_service import FaustHost, _record
from headrace_schemas.http.stack_access import BusLogin, remember_login
from tests.contract.used import hosting, scenarios
from tests.contract.used.grounds import Ground, Scenario, eventually, play_for_real, play_simulated, producing, send
from tests.contract.used.hosting import hosts_beside_each_other
from tests.contract.used.scenarios import READING, SENDING
from tests.simulation.bus import Bus, Group, Member
from tests.simulation.clients import Consumer
from tests.simulation.faust_app import App, Event
from tests.support import presence
from tests.support.presence import draw_seed
from tests.support.servers import BrokerProcess, KafkaNode

_APPEND, _COMMIT, _FETCH, _ENDS = Bus.append, Group.commit, Consumer._fetch, Consumer.end_offsets


@dataclass(frozen=True, slots=True)
class Planted:
    """Injected fault: the replaced name, its replacement, and a scenario that must fail."""

    name: str
    substitute: object
    caught_by: Scenario

    @contextlib.contextmanager
    def plant(self) -> Iterator[None]:
        with mock.patch(f"tests.simulation.{self.name}", self.substitute):
            yield


def _swapping(bus: Bus, partition: TopicPartition, *fields: Any) -> Record:
    """Append a record, and sometimes swap it with the previous record."""
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
    """Return end offsets without the last acknowledged record."""
    return {partition: max(0, end - 1) for partition, end in (await _ENDS(consumer, partitions)).items()}


async def acknowledge_backwards(host: FaustHost) -> None:
    """Process a batch, and acknowledge its records in reverse order."""
    batches: AsyncIterator[list[Any]] = host._batches()
    async for events in batches:
        await host._processor.process([_record(event) for event in events])
        for event in reversed(events):
            event.ack()


async def a_full_batch(ground: Ground) -> None:
    """Run a host that gets several records of one partition at once. Raises its exception."""
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
    "records overtake": Planted("bus.Bus.append", _swapping, scenarios.order_within_a_partition),
    "null is empty": Planted("bus.Bus.append", _without_null, scenarios.null_is_not_empty),
    "a header comes once": Planted("bus.Bus.append", _one_of_each_name, scenarios.headers_come_back),
    "another hash": Planted(
        "bus.Bus.partition_of",
        lambda bus, topic, key: zlib.crc32(key) % len(bus.logs[topic]),
        scenarios.keys_choose_partitions,
    ),
    "acknowledged before it can be read": Planted(
        "clients.Consumer.end_offsets", _late_ends, scenarios.acknowledged_is_readable
    ),
    "no bound on a poll": Planted("clients.Consumer._fetch", _without_bound, scenarios.some_at_a_time),
    "a pause does nothing": Planted("clients.Consumer.pause", lambda *_: None, scenarios.paused_places_wait),
    "assigning keeps positions": Planted(
        "clients.Consumer.assign",
        lambda consumer, partitions: consumer._next.update(
            {partition: consumer._next.get(partition, 0) for partition in partitions}
        ),
        scenarios.assigning_forgets,
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


FIXED_SEEDS = range(25)
RANDOM_SEEDS = 5
"""In every run, others in each."""
SCENARIOS: tuple[Scenario, ...] = (*SENDING, *READING, hosts_beside_each_other)
Play = Callable[[Scenario], None]


KAFKA = pytest.mark.kafka
PASSWORD = "a-password-of-the-bus"


@pytest.fixture(scope="module")
def embedded_login_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the embedded broker with password authentication."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), BUS__PASSWORD=PASSWORD)
    broker.start()
    remember_login(broker.address, BusLogin("headrace", PASSWORD))
    yield broker.address
    broker.stop()


@pytest.fixture(scope="module")
def kafka_login_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield Apache Kafka with SASL PLAIN."""
    presence.need("kafka")
    node = KafkaNode(tmp_path_factory.mktemp("kafka"), brief=True, password=PASSWORD)
    node.start()
    remember_login(node.address, BusLogin("headrace", PASSWORD))
    yield node.address
    node.stop()


@pytest.fixture(
    params=[
        "simulated",
        "embedded",
        pytest.param("embedded_login", marks=pytest.mark.long),
        pytest.param("kafka", marks=KAFKA),
        pytest.param("kafka_login", marks=KAFKA),
    ]
)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Return a function that runs a scenario on one bus, on the simulated bus with many seeds."""
    chance = random.Random(draw_seed())
    if request.param == "simulated":
        return lambda scenario: _simulated(
            scenario, [*FIXED_SEEDS, *(chance.getrandbits(32) for _ in range(RANDOM_SEEDS))]
        )
    address = request.getfixturevalue(f"{request.param}_bus")
    seed = chance.getrandbits(32)
    print(f"seed {seed}")
    return lambda scenario: play_for_real(scenario, address, tmp_path, seed)


def _simulated(scenario: Scenario, seeds: list[int]) -> None:
    for seed in seeds:
        print(f"seed {seed}")
        play_simulated(scenario, seed)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_bus_keeps_it(play: Play, scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.parametrize("name", ["embedded_login_bus", pytest.param("kafka_login_bus", marks=KAFKA)])
async def test_a_wrong_password_is_one_sentence_on_every_bus(request: pytest.FixtureRequest, name: str) -> None:
    address = request.getfixturevalue(name)
    with pytest.raises(SettingError, match=r"^setting bus\.password = .* refuses it for user 'headrace' \(\w+\)$"):
        await check_login(BusSettings.model_validate({"address": address, "password": "wrong"}))
    await check_login(BusSettings.model_validate({"address": address, "password": PASSWORD}))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_noticed(name: str) -> None:
    planted = PLANTED[name]
    for seed in FIXED_SEEDS:
        try:
            with planted.plant():
                play_simulated(planted.caught_by, seed)
        except (AssertionError, TimeoutError):
            return
    pytest.fail(f"{len(FIXED_SEEDS)} seeds did not show it")


def test_acknowledging_out_of_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated host is stricter than Faust, so that no service relies on Faust's treatment of gaps."""
    monkeypatch.setattr("headrace_runtime.stream.stream_service.FaustHost._work", acknowledge_backwards)
    with pytest.raises(ExceptionGroup) as stopped:
        play_simulated(a_full_batch, 0)
    assert stopped.group_contains(AssertionError, match="not acknowledged in order")
