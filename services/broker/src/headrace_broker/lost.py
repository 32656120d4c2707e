"""Writes a dead letter for each range that was lost by damage, so that it is listed with all other failures."""

from __future__ import annotations

import base64

from headrace_broker.batch import parse_produced
from headrace_broker.broker import Broker
from headrace_broker.errors import Rejected
from headrace_broker.inspection import LostRange
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)
_RAW_BYTES_MAX = 512 * 1024
"""Maximum number of damaged bytes in a dead letter, whose base64 has to fit into a message."""


async def dead_letter(broker: Broker, lost_ranges: list[LostRange]) -> None:
    """Append dead letters to Headrace's topic, if the broker has it. The ranges are logged in any case."""
    from headrace_schemas import DeadLetter

    topic = broker.catalog.topics.get(DeadLetter.topic)
    if topic is None:
        return
    for lost in lost_ranges:
        raw = _batch(broker, lost)
        now_ms = broker.now_ms()
        try:
            await broker.writer.submit(lambda raw=raw, now_ms=now_ms: broker.log.append(  # type: ignore[misc]
                topic.partitions[0].id, parse_produced(raw), now_ms
            ))  # fmt: skip
        except Rejected as error:
            log.error("dead_letter_refused", topic=lost.topic, first_offset=lost.first_offset, error=str(error))


def _batch(broker: Broker, lost: LostRange) -> bytes:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder

    from headrace_schemas import DeadLetter
    from headrace_schemas.events.envelope import Envelope

    event = DeadLetter(
        time=broker.clock.now(),
        service="broker",
        source_topic=lost.topic,
        source_partition=lost.partition,
        source_offset=lost.first_offset,
        source_id=f"{lost.topic}/{lost.partition}/{lost.first_offset}-{lost.last_offset}",
        value_base64=base64.b64encode(lost.raw[:_RAW_BYTES_MAX]).decode(),
        reason="damaged_on_disk",
        error=f"offsets {lost.first_offset} to {lost.last_offset}: {lost.error}",
    )
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 4 * 1024 * 1024)
    headers = list(Envelope.of(event, "broker").headers())
    builder.append(0, broker.now_ms(), event.key.encode(), event.to_json(), headers)
    return bytes(builder.build())
