"""Reader of the newest turns on the bus, by which a restarted gateway remembers the sessions in progress.

Then the next turns of these sessions are small, restarted replicas also continue their exact tokens, and clients may
refer to their responses.
"""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from headrace_gateway.apis.responses_api.recalled import recall_response
from headrace_gateway.capture.captured_turns import CapturedTurns, read_turn
from headrace_gateway.requests.identity import CallIdentity
from headrace_gateway.requests.response_store import ResponseStore
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import decode
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import TurnHistory

log = get_logger(__name__)
_RECORDS_MAX = 2_048
"""Newest records of each partition that are read."""
_BYTES_MAX = 134_217_728
"""Bytes of records that are read in total. Later ones are left out, so that a start costs little."""
_HISTORY_TOKENS_MAX = 8_000_000
_TRIES, _PAUSE_S, _POLL_MS = 20, 1.0, 500


async def recall_turns(
    bus: BusSettings, blobs: BlobStore, captured: CapturedTurns, responses: ResponseStore, client_id: str
) -> None:
    """Read the newest turns once. A bus that does not answer is tried again for a while; then the memory stays empty.

    Turns that this process captures meanwhile are newer and keep their place.
    """
    try:
        for _ in range(_TRIES if captured.remembers or responses.remembers else 0):
            reader = consumer(bus, client_id)
            try:
                await reader.start()
                count = await _read(reader, blobs, captured, responses)
                log.info("turns_recalled", turns=count)
                return
            except (KafkaError, OSError, Unavailable) as error:
                log.warning("turns_not_recalled", error=repr(error))
            finally:
                await reader.stop()
            await asyncio.sleep(_PAUSE_S)
    finally:
        captured.end_recall()
        responses.end_recall()


async def _read(reader: AIOKafkaConsumer, blobs: BlobStore, captured: CapturedTurns, responses: ResponseStore) -> int:
    partitions = await assign_all(reader, Turn.topic)
    begins, ends = await reader.beginning_offsets(partitions), await reader.end_offsets(partitions)
    for partition in partitions:
        reader.seek(partition, max(begins[partition], ends[partition] - _RECORDS_MAX))
    history = TurnHistory(_HISTORY_TOKENS_MAX)
    count, remaining_bytes = 0, _BYTES_MAX
    while any([await reader.position(partition) < ends[partition] for partition in partitions]):
        for messages in (await reader.getmany(timeout_ms=_POLL_MS)).values():
            for message in messages:
                record = record_of(message)
                remaining_bytes -= len(record.value or b"")
                if remaining_bytes < 0:
                    return count
                try:
                    event = (await decode(record, blobs)).event
                    assert isinstance(event, Turn)
                    turn = history.whole_turn(event)
                except InvalidEvent:  # damaged, or it extends a turn before the range; the collector reports it
                    continue
                remaining_bytes -= 4 * len(event.prompt_token_ids)
                identity = CallIdentity(
                    turn.tenant, turn.session_id, turn.session_key, turn.session_source, None, None, turn.purpose
                )
                captured.recall(identity, read_turn(turn))
                recall_response(turn, responses)
                count += 1
                await asyncio.sleep(0)
    return count
