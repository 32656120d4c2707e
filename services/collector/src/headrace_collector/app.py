"""Composition root of the collector."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial

from headrace_collector import schema, upkeep
from headrace_collector.handlers import ENDS_OF, Collector
from headrace_collector.settings import CollectorSettings
from headrace_collector.upkeep import end_idle_runs
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.stream import stream_service
from headrace_runtime.stream.processor import Processor, StepFailed, run_until_finished
from headrace_runtime.stream.stream_service import StreamService, Timer

log = get_logger(__name__)
_ENDS_INTERVAL_S = 0.5
_BOUNDS_INTERVAL_S = 5.0
_FORGET_INTERVAL_S = 1.0
_TARGETS_INTERVAL_S = 5.0
_IDLE_INTERVAL_S = 1.0


async def run(common: Common, settings: CollectorSettings) -> None:
    """Run the collector until cancelled."""
    await stream_service.run(service(settings, SystemClock().now()), common, settings)


def service(settings: CollectorSettings, started: datetime) -> StreamService:
    """Return the collector as a stream service. `started` is the time at which this process started."""
    collector = Collector(settings, started)
    return StreamService(
        name="collector",
        package="headrace_collector",
        tables=schema.stream,
        handlers={
            "turns": collector.on_turn,
            "feedback": collector.on_feedback,
            "session-ends": collector.on_session_end,
        },
        ends_of=ENDS_OF,
        after_batch=collector.apply_due_ends,
        timers=[
            Timer(_ENDS_INTERVAL_S, collector.apply_due_ends),
            Timer(_BOUNDS_INTERVAL_S, partial(upkeep.close_surplus_sessions, settings=settings)),
            Timer(_FORGET_INTERVAL_S, partial(upkeep.delete_old_rows, settings=settings)),
            Timer(_TARGETS_INTERVAL_S, partial(upkeep.check_feedback_targets, settings=settings)),
        ],
        workers=lambda processor: [_watch_idle(processor, settings, started)],
    )


async def _watch_idle(processor: Processor, settings: CollectorSettings, started: datetime) -> None:
    while True:
        await asyncio.sleep(_IDLE_INTERVAL_S)
        if processor.ends is None:
            continue
        try:
            turns_end = await processor.ends("turns")
        except Unavailable as error:
            log.warning("idle_postponed", error=str(error))
            continue
        step = partial(end_idle_runs, settings=settings, started=started, turns_end=turns_end)
        try:
            await run_until_finished(processor.clock, partial(processor.step, step))
        except StepFailed as error:
            log.exception("idle_postponed", error=str(error))
