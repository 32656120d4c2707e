"""Buses whose topics belong to one test: a mirror refuses topics in use, and known models restrict foreign records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.bus.clients import administering, eventually
from tests.support import presence
from tests.support.broker_process import BrokerProcess
from tests.support.kafka_node import KafkaNode


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
    """Bus that each user must leave without topics."""
    presence.need("kafka")
    node = KafkaNode(tmp_path_factory.mktemp("own-kafka"), brief=True)
    node.start()
    yield node.address
    node.stop()


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def own_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An empty bus of each kind."""
    if request.param == "embedded":
        broker = BrokerProcess(tmp_path / "broker")
        broker.start()
        yield broker.address
        broker.stop()
        return
    address: str = request.getfixturevalue("own_kafka")
    yield address
    await wipe(address)


def on_each_bus(fixture: str) -> pytest.MarkDecorator:
    """A test on each kind of bus, of which `make test` runs the embedded one."""
    return pytest.mark.parametrize(fixture, ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
