"""A demo goes on watching after the bus has died and is back."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from functools import partial
from pathlib import Path

from headrace_cli.demo.watch import Watch
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import ModelEvent
from headrace_schemas.values.base import utcnow
from tests.support.broker_process import BrokerProcess

TIME = utcnow()


def decided(decision: str, digest: str, model: str = "m", *, at_s: float = 0.0) -> ModelEvent:
    fields = {
        "time": TIME + timedelta(seconds=at_s),
        "model": model,
        "version": f"{model}@{digest * 16}",
        "decision": decision,
        "statistics": {"score": 0.5},
    }
    return ModelEvent.model_validate({"decision_id": f"{decision} {digest}", **fields})


promoted = partial(decided, "promoted")


async def test_it_outlives_the_bus_and_passes_over_other_models(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    await asyncio.to_thread(broker.start)
    settings = BusSettings(address=broker.address)
    await catalogue.ensure(settings)
    watch = Watch(broker.address, "m")
    watching = asyncio.create_task(watch.run())

    async def tell(*events: ModelEvent) -> None:
        producer = EventProducer(settings, "test", BlobStore(tmp_path.as_uri()))
        await producer.start()
        for event in events:
            await producer.send(event)
        await producer.stop()

    async def seen(count: int) -> None:
        async with asyncio.timeout(60):
            while len(watch.champions) < count:
                assert not watching.done(), watching.exception()
                watch.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(watch.changed.wait(), 1.0)

    try:
        await tell(promoted("c", "opponent"), promoted("a"))
        await seen(1)
        await asyncio.to_thread(broker.kill)
        await asyncio.sleep(2.0)  # it looks at the bus that is not there, more than once
        await asyncio.to_thread(broker.start)
        await tell(decided("registered", "b", at_s=1.5), promoted("b", at_s=9.0))
        await seen(2)
        assert watch.takeover_s == {f"m@{'b' * 16}": 7.5}
        assert watch.champions == [f"m@{digest * 16}" for digest in "ab"]
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await asyncio.to_thread(broker.stop)
