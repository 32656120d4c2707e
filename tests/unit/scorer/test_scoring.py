"""Jobs of reward functions: the jobs in memory, their leases, and the tasks that run them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from headrace_runtime.errors import Unavailable
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Trajectory
from tests.support.streams import ManualClock
from tests.support.trajectories import closed
from tests.support.turns import ask, feedback, user
from tests.unit.scorer.conftest import Open, Rig, answer, half


class Standing(ManualClock):
    """Clock on which a sleep ends only at `wake`."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []
        self._wakings = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._wakings.acquire()

    def wake(self) -> None:
        self._wakings.release()


class AtWork:
    """Run a scorer with its tasks."""

    def __init__(self, rig: Rig) -> None:
        self.clock = rig.stream.processor.clock = Standing()
        self._tasks = [asyncio.ensure_future(task) for task in rig.scoring.tasks(rig.stream.processor)]

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            for task in self._tasks:
                assert not task.done(), task
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def at_work(rig: Rig) -> AsyncIterator[AtWork]:
    work = AtWork(rig)
    try:
        yield work
    finally:
        await work.end()


def several(count: int) -> list[Trajectory]:
    """Each of a session of its own."""
    return [closed(ask([user("q")], session=f"s{n}"), session=f"s{n}") for n in range(count)]


async def look_for_jobs(rig: Rig) -> None:
    await rig.scoring.take_over(rig.stream.processor)


async def test_what_arrives_is_scored_and_entered_as_long_as_the_process_lives(open_scorer: Open) -> None:
    async with open_scorer(half) as rig, at_work(rig) as work:
        first, second, third = several(3)
        await rig.stream.deliver(first, second)
        await work.until(lambda: len(rig.experiences()) == 2)
        await rig.stream.deliver(third)
        await work.until(lambda: len(rig.experiences()) == 3)
        assert rig.rewards() == [("function:half", 0, "scored", 0.5)] * 3


async def test_a_process_that_starts_does_what_a_dead_one_left(open_scorer: Open) -> None:
    async with open_scorer(half, lease_s=15) as rig:
        await rig.stream.deliver(closed())
        await rig.perform()
        rig.scoring._leased.clear()  # it died
        if not rig.stream.processor.database.sqlite:  # others may be alive: its lease has to run out
            rig.stream.clock.advance(16)
        async with at_work(rig) as work:
            work.clock.at = rig.stream.clock.now()
            await work.until(rig.experiences)


async def test_a_database_that_is_away_for_a_moment_is_asked_again(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_scorer(half) as rig:
        looks = rig.scoring.take_over

        async def away(_processor: Processor) -> bool:
            monkeypatch.setattr(rig.scoring, "take_over", looks)
            raise Unavailable("the database is away")

        monkeypatch.setattr(rig.scoring, "take_over", away)
        await rig.stream.deliver(*several(200))
        async with at_work(rig) as work:
            await work.until(lambda: len(rig.experiences()) == 128)
            work.clock.wake()
            await work.until(lambda: len(rig.experiences()) == 200)


@pytest.mark.parametrize(("lease_s", "interval_s"), [(15.0, 1.0), (1.5, 0.5)])
async def test_a_lease_is_renewed_several_times_before_it_ends(
    open_scorer: Open, lease_s: float, interval_s: float
) -> None:
    async with open_scorer(half, lease_s=lease_s) as rig, at_work(rig) as work:
        await work.until(lambda: work.clock.slept)
        assert work.clock.slept == [interval_s]


async def test_a_job_is_leased_as_it_is_added(open_scorer: Open) -> None:
    async with open_scorer(half, lease_s=15) as rig:
        await rig.stream.deliver(closed())
        assert len(await rig.perform()) == 1
        rig.scoring._leased.clear()  # seen from another process
        rig.stream.clock.advance(14)
        await look_for_jobs(rig)
        assert await rig.perform() == []


async def test_memory_is_bounded_and_half_of_it_is_left_for_what_arrives(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        waiting = rig.scoring._waiting
        await rig.stream.deliver(*several(200))
        assert waiting.qsize() == 128
        for left, after in ((65, 65), (64, 64), (63, 64), (0, 64)):
            while waiting.qsize() > left:
                waiting.get_nowait()
            await look_for_jobs(rig)
            assert waiting.qsize() == after


async def test_a_result_that_is_refused_does_not_hold_up_those_behind_it(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        await rig.stream.deliver(*several(2))
        completed = await rig.perform()
        await rig.stream.step(rig.scoring.enter(completed[:1]))
        await rig.stream.step(rig.scoring.enter(completed))
        assert len(rig.rewards()) == 2


async def test_functions_look_again_at_every_new_fact_and_only_then(open_scorer: Open) -> None:
    turn = ask([user("q")], "Ada")
    async with open_scorer(answer) as rig:
        await rig.deliver(closed(turn))
        for expected in ("Ada", "Bob"):
            await rig.deliver(feedback("s", turn, value=None, context={"expected": expected, "level": 1}))
        assert [value for _, _, _, value in rig.rewards()] == [None, 1.0, 0.0]
        await rig.deliver(feedback("s", value=None, context={"level": 1}))
        assert len(rig.rewards()) == 3, "that was known"
