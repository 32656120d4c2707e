"""Fixtures for the collector on a real database. The test delivers the events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from headrace_collector import schema, upkeep
from headrace_collector.handlers import ENDS_OF, Collector
from headrace_collector.settings import CollectorSettings
from headrace_collector.upkeep import end_idle_runs
from headrace_schemas import Trajectory
from tests.support.streams import Bench, ManualClock, Service, bench
from tests.support.turns import START

Open = Callable[..., AbstractAsyncContextManager[Bench]]


def collector(url: str, data_dir: Path, **settings: object) -> AbstractAsyncContextManager[Bench]:
    """Return a context manager that starts a collector with these settings."""
    opened = Collector(CollectorSettings.model_validate({"idle_s": 300.0, **settings}), START)
    service = Service(
        tables=schema.stream,
        handlers={"turns": opened.on_turn, "feedback": opened.on_feedback, "session-ends": opened.on_session_end},
        package="headrace_collector",
        ends_of=ENDS_OF,
        after_batch=opened.apply_due_ends,
    )
    return bench(service, url, data_dir, ManualClock())


@pytest.fixture
async def stream(database_url: str, data_dir: Path) -> AsyncIterator[Bench]:
    async with collector(database_url, data_dir) as opened:
        yield opened


@pytest.fixture
def with_settings(database_url: str, data_dir: Path) -> Open:
    return partial(collector, database_url, data_dir)


def turns_of(stream: Bench) -> list[tuple[str, list[str]]]:
    """Return the end reason and the turn ids of each published trajectory."""
    return [(trajectory.end_reason, list(trajectory.turn_ids)) for trajectory in stream.sent(Trajectory)]


async def pass_time(stream: Bench, seconds: float, *, started: datetime = START, **settings: object) -> None:
    """Advance the clock by `seconds`, and run the collector's timer for idle runs."""
    chosen = CollectorSettings.model_validate({"idle_s": 300.0, **settings})
    stream.clock.advance(seconds)
    after_batch = stream.processor.after_batch
    assert after_batch is not None
    ends = dict(await stream.ends("turns"))
    await stream.step(partial(end_idle_runs, settings=chosen, started=started, turns_end=ends))
    await stream.step(after_batch)
    await stream.step(lambda tx, now: upkeep.check_feedback_targets(tx, now, chosen))
