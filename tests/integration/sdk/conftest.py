"""A Kafka whose topics are nobody else's: a mirror refuses a bus that is in use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import presence
from tests.support.kafka_node import KafkaNode


@pytest.fixture(scope="package")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Whoever uses it leaves it without topics."""
    presence.need("kafka")
    node = KafkaNode(tmp_path_factory.mktemp("own-kafka"))
    node.start()
    yield node.address
    node.stop()
