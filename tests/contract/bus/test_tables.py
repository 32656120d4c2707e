"""A compacted topic read as a table: last value wins, no value removes."""

from __future__ import annotations

import pytest
from aiokafka.errors import KafkaError

from tests.contract.bus.clients import everything, producing
from tests.contract.bus.conftest import CreateTopic


async def test_last_value_wins_and_a_tombstone_removes(bus: str, create: CreateTopic) -> None:
    topic = await create(cleanup_policy="compact")
    writes = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"c", b"1")]
    async with producing(bus) as producer:
        for key, value in writes:
            await producer.send_and_wait(topic, value, key)
    table: dict[bytes, bytes] = {}
    for record in await everything(bus, topic):
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = record.value
    assert table == {b"a": b"2", b"c": b"1"}


@pytest.mark.parametrize("compression", [None, "gzip"])
async def test_records_without_key_are_refused(bus: str, create: CreateTopic, compression: str | None) -> None:
    topic = await create(cleanup_policy="compact")
    async with producing(bus, compression_type=compression) as producer:
        with pytest.raises(KafkaError):  # 87, which aiokafka does not know by name; see test_wire
            await producer.send_and_wait(topic, b"no key")
    assert await everything(bus, topic) == []
