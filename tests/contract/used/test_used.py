"""Behaviour of the bus that our runtime uses, checked on each bus: the fake behaves as the real ones do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.kafka.bus_client import check_login
from headrace_runtime.settings.sections import BusSettings
from headrace_schemas.http.stack_access import BusLogin, remember_login
from tests.contract.used.ground import Scenario
from tests.contract.used.grounds import play_for_real, play_simulated
from tests.contract.used.hosting import hosts_beside_each_other
from tests.contract.used.planted import PLANTED, a_full_batch, acknowledge_backwards
from tests.contract.used.reading import READING
from tests.contract.used.sending import SENDING
from tests.support import presence
from tests.support.broker_process import BrokerProcess
from tests.support.kafka_node import KafkaNode
from tests.support.seeds import draw_seed

FIXED_SEEDS = range(25)
RANDOM_SEEDS = 5
"""In every run, others in each."""
SCENARIOS: tuple[Scenario, ...] = (*SENDING, *READING, hosts_beside_each_other)
Play = Callable[[Scenario], None]


KAFKA = pytest.mark.kafka
PASSWORD = "a-password-of-the-bus"


@pytest.fixture(scope="module")
def embedded_login_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded broker with a login."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), BUS__PASSWORD=PASSWORD)
    broker.start()
    remember_login(broker.address, BusLogin("headrace", PASSWORD))
    yield broker.address
    broker.stop()


@pytest.fixture(scope="module")
def kafka_login_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Apache Kafka with SASL PLAIN."""
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
    """Plays a scenario on one bus, the simulated one with many seeds."""
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
    """The simulated host is harsher than Faust here, so that no service relies on Faust's treatment of gaps."""
    monkeypatch.setattr("headrace_runtime.stream.faust_host.FaustHost._work", acknowledge_backwards)
    with pytest.raises(ExceptionGroup) as stopped:
        play_simulated(a_full_batch, 0)
    assert stopped.group_contains(AssertionError, match="not acknowledged in order")
