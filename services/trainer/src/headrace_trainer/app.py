"""The composition root: connects bus, blob store, lineage, training loop and HTTP server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headrace_runtime.clock import SystemClock
from headrace_runtime.http import web
from headrace_runtime.http.web import settings_route
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import base_models
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.stream.pausing import DeadLetterLimiter, resume_route
from headrace_schemas import Event, ModelEvent
from headrace_trainer.metrics import ALGORITHM
from headrace_trainer.report import Reporter
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.source import KafkaSource
from headrace_trainer.trainer import Trainer

log = get_logger(__name__)


class Announcer:
    """`Sink` that publishes events on Kafka, with `prefix` before the name of each topic."""

    def __init__(self, producer: EventProducer, prefix: str) -> None:
        self._producer = producer
        self._prefix = prefix

    async def send(self, event: Event) -> None:
        record = await self._producer.encode(event)
        await self._producer.send_raw([replace(record, topic=f"{self._prefix}{record.topic}")])


async def run(common: Common, settings: TrainerSettings) -> None:
    """Run the trainer until `max_steps` or until cancelled. A base on the Hugging Face hub is downloaded first."""
    base = await asyncio.to_thread(base_models.resolve, settings.base, common.data_dir)
    configured, settings = settings, settings.model_copy(update={"base": str(base)})
    kinds = {"algorithm": settings.algorithm, "advantage": settings.advantage.kind, "loss": settings.loss.kind}
    kinds["backend"] = settings.backend
    ALGORITHM.info(kinds)
    log.info("algorithm", **kinds)
    blobs = BlobStore.open(common)
    producer = EventProducer(common.bus, "headrace/trainer", blobs)
    source = KafkaSource(common.bus, settings.topic, ModelEvent.topic)
    folder = common.data_dir.absolute() / "trainer" / "tensorboard" / settings.lineage
    refuse = DeadLetterLimiter(
        "trainer", DeadLetterSender("trainer", producer, common.data_dir / "trainer"), common.dead_letters.bounds
    )
    trainer = Trainer(
        settings,
        blobs,
        source,
        Announcer(producer, settings.announce_to),
        refuse,
        SystemClock(),
        lambda: Reporter(folder),
        common.disk_free_bytes_min,
    )
    checks: dict[str, web.Check] = {
        "bus": lambda: source.started or trainer.is_standby,
        "lineage": lambda: trainer.lineage is not None or trainer.is_standby,
        "consumer": lambda: refuse.paused is None,
        "room": lambda: trainer.room.trouble or True,
        "learner": lambda: trainer.learner_failure or True,
    }
    notes: dict[str, web.Check] = {
        "training": lambda: trainer.stop_reason or True,
        "rewards": lambda: trainer.stray_rewards or True,
    }
    routes = [resume_route(trainer, common), settings_route("trainer", configured, common)]
    async with web.serve(web.app(checks, routes, common, notes=notes), settings, common.security) as port:
        log.info("listening", port=port)
        try:
            await topics.ensure(common.bus)
            await producer.start()
            await trainer.run()
        finally:
            await source.stop()
            await producer.stop()
