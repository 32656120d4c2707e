"""Reward events of reward functions: a score only if the function returned one (P6)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.rewards.serving import verdict, verdicts
from headrace_schemas import Reward, RewardResult, Trajectory
from tests.support.account_events import trajectory

RUN = trajectory("T", ("a",))


async def verdict_of(function: Callable[[Trajectory], Any], timeout_s: float = 10.0) -> Reward:
    return await verdict(function, RUN, "mine", timeout_s)


@pytest.mark.parametrize(
    ("returned", "outcome", "value", "criteria"),
    [
        (0.25, "scored", 0.25, {}),
        (True, "scored", 1.0, {}),
        (0, "scored", 0.0, {}),
        (None, "abstained", None, {}),
        ({"value": 0.5, "tone": 1.0}, "scored", 0.5, {"tone": 1.0}),
        ({"tone": 1.0, "length": 0.0}, "scored", 0.5, {"tone": 1.0, "length": 0.0}),
        ({"value": None}, "abstained", None, {}),
        (RewardResult(value=0.5, reason="fine"), "scored", 0.5, {}),
        (RewardResult(), "abstained", None, {}),
        ("1.0", "failed", None, {}),
        (float("nan"), "failed", None, {}),
        ({"tone": "high"}, "failed", None, {}),
    ],
)
async def test_verdict_has_the_value_of_the_function(
    returned: object, outcome: str, value: float | None, criteria: dict[str, float]
) -> None:
    reward = await verdict_of(lambda _: returned)
    assert (reward.outcome, reward.value, reward.criteria) == (outcome, value, criteria)


async def test_async_functions_are_awaited_and_errors_are_no_scores() -> None:
    async def later(run: Trajectory) -> float:
        await asyncio.sleep(0)
        return float(len(run.turn_ids))

    def wrong(_run: Trajectory) -> float:
        raise TimeoutError("my own")

    assert (await verdict_of(later)).value == 1.0
    reward = await verdict_of(wrong)
    assert (reward.outcome, reward.reason) == ("failed", "TimeoutError: my own")


async def test_slow_function_times_out_whether_it_can_be_cancelled_or_not() -> None:
    never = threading.Event()

    async def forever(_run: Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert (await verdict_of(forever, 0.05)).outcome == "timed_out"
    assert (await verdict_of(lambda _: never.wait(), 0.05)).outcome == "timed_out"
    never.set()


async def test_the_same_verdict_has_the_same_id_and_the_sessions_key() -> None:
    first, second = await verdict_of(lambda _: 1.0), await verdict_of(lambda _: 1.0)
    assert first.event_id == second.event_id
    assert (first.key, first.trajectory_id, first.source) == (RUN.key, "T", "mine")


async def test_rewards_of_turns_follow_the_reward_of_the_run() -> None:
    (turn,) = RUN.branches[0].turn_ids
    result = RewardResult(value=1.0, turns={turn: 0.25, "unknown": 1.0}, reason="because")
    run_reward, of_turn = await verdicts(lambda _run: result, RUN, "mine", 10.0)
    assert (run_reward.turn_id, run_reward.value, run_reward.reason) == (None, 1.0, "because")
    assert (of_turn.turn_id, of_turn.value, of_turn.outcome, of_turn.reason) == (turn, 0.25, "scored", None)
    assert run_reward.event_id != of_turn.event_id
