"""Tests of the jobs of reward functions (queue, leases, tasks) and of the experiences that a score publishes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
from prometheus_client import REGISTRY

from headrace_runtime.errors import Unavailable
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Experience, RewardPart, Trajectory
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.scores import TrajectoryScore, _experiences, _is_ready, _other_sources_answered, _state
from tests.support.streams import ManualClock
from tests.support.turns import START, ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, Rig, answer, half
from tests.unit.scorer.test_scorer import reward


class Standing(ManualClock):
    """Clock whose `sleep` returns only after a call of `wake`."""

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
    """Context that runs a scorer with its tasks."""

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
    """Return `count` trajectories, each of a different session."""
    return [closed(ask([user("q")], session=f"s{n}"), session=f"s{n}") for n in range(count)]


async def look_for_jobs(rig: Rig) -> None:
    await rig.scoring.lease_jobs(rig.stream.processor)


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
        looks = rig.scoring.lease_jobs

        async def away(_processor: Processor) -> bool:
            monkeypatch.setattr(rig.scoring, "lease_jobs", looks)
            raise Unavailable("the database is away")

        monkeypatch.setattr(rig.scoring, "lease_jobs", away)
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
        await rig.stream.step(rig.scoring.result_step(completed[:1]))
        await rig.stream.step(rig.scoring.result_step(completed))
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


MINE = RewardPolicy({"*": 1.0}, expected=["mine"])


class FixedEntries(LedgerEntries):
    """Ledger entries with rewards that the test sets."""

    def __init__(self, *rewards: SourceReward) -> None:
        self.now = list(rewards)

    def current(self) -> list[SourceReward]:
        return self.now

    def corrections(self) -> dict[EntryKey, str]:
        return {}


def new_score(*rewards: SourceReward) -> TrajectoryScore:
    row = {
        "emitted": "[]", "task_id": None, "run_id": None, "parts": 1, "settle_ms": 1, "inputs": "", "scored_inputs": "",
    }  # fmt: skip
    return TrajectoryScore(closed(), row, FixedEntries(*rewards))


def revisions_after(score: TrajectoryScore, *rewards: SourceReward) -> list[tuple[int, float | None, str | None]]:
    """Return the revision, reward and reason of each experience that `rewards` lead to."""
    assert isinstance(score.entries, FixedEntries)
    score.entries.now = list(rewards)
    return [
        (experience.revision, experience.reward, experience.no_reward)
        for experience in _experiences(score, START, MINE)
    ]


def test_a_branch_that_was_rewarded_once_stays_withdrawn_whatever_changes_beside_it() -> None:
    score = new_score()
    withdrawal = SourceReward("mine", None, "withdrawn", None)
    assert revisions_after(score, SourceReward("mine", None, "scored", 1.0)) == [(0, 1.0, None)]
    assert revisions_after(score, withdrawal) == [(1, None, "withdrawn")]
    score.change(task_id="t")
    assert revisions_after(score, withdrawal) == [(2, None, "withdrawn")], (
        "its weights may hold it, so the trainer has to hear it again"
    )
    assert revisions_after(score, withdrawal) == []


def test_a_branch_that_never_was_is_not_withdrawn() -> None:
    score = new_score()
    assert revisions_after(score, SourceReward("mine", None, "failed", None)) == [(0, None, "no_reward")]
    score.change(task_id="t")
    assert revisions_after(score, SourceReward("mine", None, "failed", None)) == [(1, None, "no_reward")]
    assert revisions_after(score, SourceReward("mine", None, "scored", 0.0))[0][:2] == (2, 0.0), "a zero is a reward"
    assert revisions_after(score, SourceReward("mine", None, "failed", None)) == [(3, None, "withdrawn")]


def test_parts_say_who_made_the_reward() -> None:
    score = new_score(SourceReward("mine", None, "scored", 0.5))
    (experience,) = _experiences(score, START, MINE)
    assert experience.parts == (RewardPart(source="mine", value=0.5, weight=1.0),)


@pytest.mark.parametrize("emitted", ["[]", '[{"revision": 0}]'])
def test_nothing_is_ready_while_functions_have_not_seen_the_newest_feedback(emitted: str) -> None:
    policy = RewardPolicy({"*": 1.0}, functions=["function:a"])
    score = new_score(SourceReward("function:a", None, "scored", 1.0))
    score.change(emitted=emitted, inputs="new", scored_inputs="old")
    assert not _is_ready(score, policy)
    score.change(scored_inputs="new")
    assert _is_ready(score, policy)


LEARNED = "learned:thumbs"


def test_the_reward_model_speaks_when_all_others_have_answered() -> None:
    policy = RewardPolicy({"*": 1.0}, expected=["mine", "learned:*"])
    assert not _other_sources_answered(new_score(), policy, LEARNED)
    score = new_score(SourceReward("mine", None, "abstained", None))
    assert _other_sources_answered(score, policy, LEARNED)
    score.change(settle_ms=None)
    assert not _other_sources_answered(score, policy, LEARNED), "what is not trained waits for nothing"


def test_the_reward_model_speaks_anew_of_what_was_emitted_once_functions_have_seen_all() -> None:
    policy = RewardPolicy({"*": 1.0}, expected=["mine"], functions=["function:a"])
    score = new_score()
    score.change(emitted='[{"revision": 0}]', settle_ms=None, inputs="new", scored_inputs="old")
    assert not _other_sources_answered(score, policy, LEARNED)
    score.change(scored_inputs="new")
    assert _other_sources_answered(score, policy, LEARNED)


async def test_functions_that_missed_the_end_of_waiting_are_not_waited_for_again(open_scorer: Open) -> None:
    async with open_scorer(half, reward_wait_s=60) as rig:
        trajectory = closed()
        await rig.stream.deliver(trajectory)
        await rig.pass_time(61)
        assert rig.experiences() == [(0, 0, None, "no_reward")]
        await rig.stream.deliver(reward(trajectory, "judge:x", 1.0))
        assert rig.experiences()[1:] == [(0, 1, 1.0, None)]


@pytest.mark.parametrize("unrewarded_branches", [True, False])
async def test_a_branch_without_a_reward_comes_where_it_is_asked_for(
    open_scorer: Open, unrewarded_branches: bool
) -> None:
    """Some algorithms train branches without rewards, for example distillation from a teacher."""
    async with open_scorer(half, reward_wait_s=60, unrewarded_branches=unrewarded_branches) as rig:
        trajectory = closed()
        await rig.stream.deliver(trajectory)
        await rig.pass_time(61)
        (experience,) = rig.stream.sent(Experience)
        assert (experience.reward, experience.no_reward) == (None, "no_reward")
        assert experience.branch == (trajectory.branches[0] if unrewarded_branches else None)


def measured(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_scorer_{name}", labels) or 0.0


@pytest.mark.parametrize(("age_s", "seconds"), [(0.25, 0.25), (-3.0, 0.0)])
def test_the_time_to_the_first_experience_is_measured_once(age_s: float, seconds: float) -> None:
    """A negative age results from clocks that differ."""
    score = new_score(SourceReward("mine", None, "scored", 1.0))
    count, total = measured("experience_seconds_count"), measured("experience_seconds_sum")
    now = score.trajectory.time + timedelta(seconds=age_s)
    assert len(_experiences(score, now, MINE)) == 1
    score.change(task_id="t")
    assert len(_experiences(score, now + timedelta(seconds=100), MINE)) == 1
    assert measured("experience_seconds_count") == count + 1
    assert measured("experience_seconds_sum") == pytest.approx(total + seconds)


def test_experiences_are_counted_by_what_they_say() -> None:
    score = new_score()
    before = [measured("experiences_total", state=state) for state in ("rewarded", "withdrawn")]
    revisions_after(score, SourceReward("mine", None, "scored", 1.0))
    revisions_after(score, SourceReward("mine", None, "withdrawn", None))
    after = [measured("experiences_total", state=state) for state in ("rewarded", "withdrawn")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]


def test_the_stored_state_is_that_of_earlier_releases_and_changes_with_each_field() -> None:
    (first,) = _experiences(new_score(SourceReward("mine", None, "scored", 1.0)), START, MINE)
    assert _state(first) == "ac874d3975fb53be", "databases hold this digest of the reward, parts, weight, task and run"
    changes: list[dict[str, object]] = [
        {"reward": 0.5},
        {"weight": 0.5},
        {"task_id": "t"},
        {"parts_left_out": ("metric:a",)},
    ]
    changes += [{"parts_left_out": ("metric:b",)}, {"parts": ()}]
    states = {_state(first.model_copy(update=change)) for change in ({}, *changes)}
    assert len(states) == 1 + len(changes), "a revision that differs in any of these is sent"
