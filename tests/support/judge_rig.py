"""The judge on a real database with a fake model, without a bus: trajectories in, rewards out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from headrace_judge import app
from headrace_judge.settings import JudgeSettings
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Processor
from headrace_runtime.stream.stream_service import StreamService
from headrace_schemas import Branch, Dialogue, Message, Reward, Span, Trajectory
from headrace_schemas.values.ids import session_key
from tests.support.fake_llm import FakeLLM
from tests.support.streams import Bench, ManualClock, MemoryProducer, Service, bench
from tests.support.turns import START

WAIT_S = 20.0


def settings(llm: FakeLLM | str, **changes: Any) -> JudgeSettings:
    """Return settings of a judge that calls `llm`. `changes` are merged by section."""
    base_url = llm if isinstance(llm, str) else llm.base_url
    data: dict[str, Any] = {"endpoint": {"base_url": base_url, "model": "judge-1", "timeout_s": 5.0}}
    for name, value in changes.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return JudgeSettings.model_validate(data)


def said(*messages: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message.model_validate({"role": role, "content": content}) for role, content in messages)


def trajectory(name: str, answer: str = "Ada", **changes: Any) -> Trajectory:
    """Return a run of one question and one answer. The judge cannot distinguish runs with equal answers."""
    messages = changes.pop("messages", None) or said(("user", "Who sent the invoice?"), ("assistant", answer))
    span = Span(start=1, logprobs=(-0.5,), turn_id=f"turn-{name}", version="agent@0123456789ab")
    fields: dict[str, Any] = {
        "time": START,
        "trajectory_id": name,
        "session_key": session_key("default", name),
        "session_id": name,
        "model": "agent",
        "branches": (Branch(token_ids=(1, 2), spans=(span,)),),
        "dialogues": (Dialogue(messages=messages),),
        "end_reason": "end_call",
        "started_at": START - timedelta(seconds=5),
    }
    return Trajectory(**(fields | changes))


class Rig:
    """One judge with a manual clock. `restart` crashes it and starts a new one on the same database."""

    def __init__(self, service_bench: Bench, service: StreamService, settings: JudgeSettings) -> None:
        self.bench = service_bench
        self.service = service
        self._wanted = settings
        self._work: asyncio.Task[None] | None = None

    @property
    def rewards(self) -> list[Reward]:
        return self.bench.sent(Reward)

    def start(self) -> None:
        (work,) = self.service.workers(self.bench.processor)
        self._work = asyncio.ensure_future(work)

    async def stop(self) -> None:
        assert self._work is not None
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work

    async def restart(self) -> None:
        await self.stop()
        self.service = app.service(self._wanted)
        self.bench.processor.handlers = self.service.handlers
        self.start()

    async def until(self, condition: Callable[[], object], description: str = "condition") -> None:
        """Wait in real time, while the judge's clock stands still. Raises the worker's exception."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self._work is not None
            if self._work.done():
                self._work.result()
            assert time.monotonic() < deadline, f"{description}: not after {WAIT_S} s; rewards: {self.rewards}"
            await asyncio.sleep(0.005)

    async def judged(self, count: int = 1) -> list[Reward]:
        """Return the published rewards once there are `count`."""
        await self.until(lambda: len(self.rewards) >= count, f"{count} rewards")
        return self.rewards

    async def idle(self) -> None:
        """Wait until no trajectory is being judged."""
        await asyncio.sleep(0.015)  # more than one look at the queue
        await self.until(lambda: REGISTRY.get_sample_value("headrace_judge_in_progress") == 0, "an idle worker")

    async def tick(self, seconds: float = 0.0) -> None:
        """Advance the clock and run the timers once."""
        self.bench.clock.advance(seconds)
        for timer in self.service.timers:
            await self.bench.step(timer.step)


@contextlib.asynccontextmanager
async def replica(of: Rig, settings: JudgeSettings, data_dir: Path, url: str) -> AsyncIterator[Rig]:
    """Run a second judge on the database of `of`, with its own clock and bus."""
    first = of.bench.processor.database
    name = first.schema or Path(first.engine.url.database or "").stem
    common = Common.model_validate({"data_dir": data_dir, "database": {"url": url}})
    database = Database.open(name, common)
    blobs = BlobStore.open(common)
    producer, clock = MemoryProducer(blobs), ManualClock()
    service = app.service(settings)
    processor = Processor(
        service="test",
        handlers=service.handlers,
        database=database,
        tables=service.tables,
        outbox=Outbox(database, service.tables, producer, clock),
        blobs=blobs,
        clock=clock,
    )
    rig = Rig(Bench(processor, producer, clock), service, settings)
    rig.start()
    try:
        yield rig
    finally:
        await rig.stop()
        await database.close()


@contextlib.asynccontextmanager
async def judge(settings: JudgeSettings, data_dir: Path, url: str = "sqlite") -> AsyncIterator[Rig]:
    """Run a judge with an empty database during the block."""
    service = app.service(settings)
    hosted = Service(service.tables, service.handlers, package=service.package, limits=service.limits)
    async with bench(hosted, url, data_dir) as service_bench:
        rig = Rig(service_bench, service, settings)
        rig.start()
        try:
            yield rig
        finally:
            await rig.stop()
