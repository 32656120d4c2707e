"""Events beyond the limit of a topic go through the blob store, at every step, on both buses."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError

from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import record_of
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, Experience, Trajectory, Turn
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX
from tests.contract.bus.clients import eventually
from tests.integration.streams.rig import rig_on
from tests.support.gateway_process import read_topic
from tests.support.marks import on_each_bus
from tests.support.turns import ask, feedback, user

MEBIBYTE = 1_048_576


@on_each_bus("own_bus")
@pytest.mark.long
async def test_a_turn_of_three_mebibytes_becomes_an_experience(own_bus: str, tmp_path: Path) -> None:
    session = tmp_path.name
    turn = ask([user("x" * MEBIBYTE)] * 3, "right", session=session, prompt_token_ids=(1, 2, 3))
    value = turn.to_json()
    assert len(value) > 3 * topics.catalogue()["turns"].max_message_bytes
    async with rig_on(own_bus, tmp_path) as rig:
        await the_bus_itself_refuses(own_bus, turn)
        await rig.start()
        await rig.producer.send(turn)
        await rig.producer.send(feedback(session, value=1.0, ends_session=True))

        async def scored() -> bool:
            return any(experience.session_id == session for experience in await rig.read(Experience))

        await eventually(scored, 60)
        assert [event for event in await rig.read(Turn) if event.turn_id == turn.turn_id] == [turn]
        (trajectory,) = [event for event in await rig.read(Trajectory) if event.session_id == session]
        assert trajectory.messages[:3] == turn.messages
        assert [event for event in await rig.read(DeadLetter) if event.key == turn.key] == []
        poison = Record("turns", 0, 7, turn.key.encode(), b"{" * (MEBIBYTE - 1000))
        await rig.producer.send(dead_letter("test", poison, "invalid_json", "not json"))
        (letter,) = [event for event in await rig.read(DeadLetter) if event.key == turn.key]
        assert letter.value == poison.value, "a refused record of the largest size is kept whole"
    blobs = BlobStore(f"file://{tmp_path}/blobs")
    for topic in ("turns", "trajectories", "dead-letters"):
        (record,) = [event for event in await raw(own_bus, topic) if event.key == turn.key.encode()]
        assert len(record.value or b"") <= PAYLOAD_BYTES_MAX
        assert any(name == "ce_dataref" for name, _ in record.headers), topic
    assert len(list(blobs.digests())) == 3


async def the_bus_itself_refuses(bus: str, turn: Turn) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bus, max_request_size=8 * MEBIBYTE) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait("turns", turn.to_json(), turn.key.encode())


async def raw(bus: str, topic: str) -> list[Record]:
    return [record_of(message) for message in await read_topic(BusSettings(address=bus), topic)]
