"""Runs a `Processor` on Faust, which delivers raw bytes. Offsets are committed only after the effect is durable.

Faust's own decoding, batching (`take`) and tables are not used: Faust skips records that it cannot decode, `take`
acknowledges a batch whose handler raised, and its tables are not part of the service's transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import faust

import headrace_runtime.kafka.damage  # noqa: F401 (a damaged batch must not stop aiokafka, which Faust uses)
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.topics import client_options
from headrace_runtime.kafka.wire import Record
from headrace_runtime.metrics import QUEUE_LENGTH
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage import disk
from headrace_runtime.stream.processor import Processor, StepFailed

log = get_logger(__name__)
_PRUNE_INTERVAL_S = 60.0


class FaustHost:
    """Host of one processor, with one consumer group and one agent for all topics. Batches are processed in sequence.

    `folder` is for Faust, which creates an empty one, by default in the working directory.
    """

    def __init__(
        self,
        processor: Processor,
        topics: tuple[str, ...],
        bus: BusSettings,
        *,
        group: str,
        folder: Path,
        batch_max: int = 200,
    ) -> None:
        self._processor = processor
        self._topics = topics
        self._bus = bus
        self._batch_max = batch_max
        self._queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=batch_max * 2)
        self._app = _app(group, bus, folder)
        self._offsets = Offsets(bus, group)
        self.assigned = asyncio.Event()
        """Set while the group has assigned partitions, so that the service is ready."""

    async def run(self) -> None:
        """Consume until cancelled. Raises if the processor fails; then the process must be restarted.

        A restart loses no records: unacknowledged ones are delivered again, and handled ones are deduplicated.
        """
        self._declare()
        try:
            await self._offsets.start()
            self._processor.ends = self._offsets.ends
            starts = await self._offsets.starts(self._topics)
            await disk.retry_while_full(lambda: self._processor.recover(starts))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work())
                group.create_task(self._prune())
                group.create_task(self._watch())
                await self._app.start()
        finally:
            await self._app.stop()
            await self._offsets.stop()

    def _declare(self) -> None:
        channel = self._app.topic(
            *self._topics, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
        )

        async def receive(stream: Any) -> None:
            async for event in stream.noack().events():
                await self._queue.put(event)
                QUEUE_LENGTH.set(self._queue.qsize())

        async def assigned(*_: object, **__: object) -> None:
            self.assigned.set()

        async def revoked(*_: object, **__: object) -> None:
            self.assigned.clear()

        self._app.agent(channel, name=f"{self._app.conf.id}-agent")(receive)
        self._app.on_partitions_assigned.connect(assigned, weak=False)
        self._app.on_partitions_revoked.connect(revoked, weak=False)

    async def _work(self) -> None:
        async for events in self._batches():
            await self._processor.process([_record(event) for event in events])
            for event in events:
                event.ack()

    async def _batches(self) -> AsyncIterator[list[Any]]:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._batch_max and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            QUEUE_LENGTH.set(self._queue.qsize())
            yield batch

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_INTERVAL_S)
            try:
                await self._processor.prune()
            except (Unavailable, StepFailed) as error:
                log.warning("prune_postponed", error=str(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self._app.crashed or self._app.should_stop:
                raise Unavailable(f"Faust stopped: {self._app.crash_reason!r}")


def _app(group: str, bus: BusSettings, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return faust.App(
        group,
        datadir=folder,
        broker=[f"kafka://{address}" for address in bus.address.split(",")],
        broker_credentials=_credentials(bus),
        store="memory://",
        web_enabled=False,
        autodiscover=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=bus.session_timeout_s,
        broker_heartbeat_interval=1.0,
        broker_commit_interval=1.0,
        # The response to a join waits for all other members, at the longest until the session of a dead one expires.
        broker_request_timeout=max(bus.request_timeout_s, bus.session_timeout_s),
        stream_wait_empty=False,
        loghandlers=[],
        logging_config={"version": 1, "disable_existing_loggers": False, "incremental": True},
    )


def _credentials(bus: BusSettings) -> Any:
    """Return the login in Faust's form, or None without a login."""
    options = client_options(bus)
    context = options.get("ssl_context")
    if "sasl_mechanism" not in options:
        return None if context is None else faust.SSLCredentials(context)
    return faust.SASLCredentials(
        username=options["sasl_plain_username"],
        password=options["sasl_plain_password"],
        mechanism=options["sasl_mechanism"],
        ssl_context=context,
    )


def _record(event: Any) -> Record:
    message = event.message
    headers = message.headers.items() if isinstance(message.headers, Mapping) else message.headers or ()
    at_ms = message.timestamp_ms if hasattr(message, "timestamp_ms") else int(message.timestamp * 1000)
    return Record(message.topic, message.partition, message.offset, message.key, message.value, tuple(headers), at_ms)
