"""Fixtures for buses with the topics of one test.

A mirror refuses topics in use, and models that the registry knows restrict records of other producers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.bus.clients import administering, eventually
from tests.support import presence
from tests.support.buses import BrokerProcess, KafkaNode


async def wipe(bus: str) -> None:
    async with administering(bus) as admin:

        async def topics() -> list[str]:
            return [name for name in await admin.list_topics() if not name.startswith("__")]

        async def empty() -> bool:
            return not await topics()

        await admin.delete_topics(await topics())
        await eventually(empty)


@pytest.fixture(scope="package")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Kafka bus. Each user must delete all topics after use."""
    presence.need("kafka")
    node = KafkaNode(tmp_path_factory.mktemp("own-kafka"), brief=True)
    node.start()
    yield node.address
    node.stop()


@pytest.fixture
def empty_bus(tmp_path: Path) -> Iterator[str]:
    """Yield the address of an embedded broker for this test alone."""
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def own_bus(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Yield the address of an empty bus of each kind."""
    if request.param == "embedded":
        yield request.getfixturevalue("empty_bus")
        return
    address: str = request.getfixturevalue("own_kafka")
    yield address
    await wipe(address)


def on_each_bus(fixture: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test on each kind of bus. `make test` runs only the embedded broker."""
    return pytest.mark.parametrize(fixture, ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
