"""The budget counts calls before they are made, survives restarts, and is renewed with each period."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace_judge.call_budget import BudgetLimit, CallBudget, Reservation
from headrace_judge.settings import BudgetSettings
from headrace_judge.tables import STREAM
from tests.support import fake_llm
from tests.support.fake_llm import FakeLLM
from tests.support.judge_rig import judge, settings, trajectory
from tests.support.streams import START, Bench, Service, bench

LATE = datetime(2026, 3, 31, 23, 30, tzinfo=UTC)


@pytest.fixture
async def state(data_dir: Path) -> AsyncIterator[Bench]:
    async with bench(Service(STREAM, {}), "sqlite", data_dir) as opened:
        yield opened


async def reserve(state: Bench, budget: CallBudget, now: datetime, tokens: int = 10) -> Reservation | BudgetLimit:
    async with state.processor.database.transaction() as tx:
        return await budget.reserve(tx, now, tokens)


async def left(state: Bench, budget: CallBudget, now: datetime) -> dict[str, int]:
    async with state.processor.database.transaction() as tx:
        return await budget.left(tx, now)


async def test_calls_are_limited_per_hour_and_per_day(state: Bench) -> None:
    budget = CallBudget(BudgetSettings(calls_per_hour=2, calls_per_day=3))
    assert [type(await reserve(state, budget, LATE)) for _ in range(3)] == [Reservation, Reservation, BudgetLimit]
    assert str(await reserve(state, budget, LATE)) == "the budget is spent: judge.budget.calls_per_hour = 2"
    earlier = LATE - timedelta(hours=3)
    assert isinstance(await reserve(state, budget, earlier), Reservation)
    assert await reserve(state, budget, earlier) == BudgetLimit("calls_per_day", 3)
    assert isinstance(await reserve(state, budget, LATE + timedelta(minutes=30)), Reservation), "a new day"


async def test_tokens_are_estimated_first_and_corrected_afterwards(state: Bench) -> None:
    budget = CallBudget(BudgetSettings(tokens_per_day=100))
    reserved = await reserve(state, budget, LATE, 80)
    assert isinstance(reserved, Reservation)
    assert await reserve(state, budget, LATE, 30) == BudgetLimit("tokens_per_day", 100)
    async with state.processor.database.transaction() as tx:
        await budget.correct(tx, reserved, 15)
    assert await left(state, budget, LATE) == {"tokens_per_day": 85}
    async with state.processor.database.transaction() as tx:
        await budget.correct(tx, reserved, None)
    assert await left(state, budget, LATE) == {"tokens_per_day": 85}


async def test_without_limits_everything_is_allowed(state: Bench) -> None:
    budget = CallBudget(BudgetSettings())
    assert isinstance(await reserve(state, budget, LATE, 10**9), Reservation)
    assert await left(state, budget, LATE) == {}


async def test_nothing_is_allowed_where_the_limit_is_0(state: Bench) -> None:
    assert await reserve(state, CallBudget(BudgetSettings(calls_per_day=0)), LATE) == BudgetLimit("calls_per_day", 0)


async def test_old_periods_are_forgotten(state: Bench) -> None:
    budget = CallBudget(BudgetSettings(calls_per_day=1))
    await reserve(state, budget, START)
    async with state.processor.database.transaction() as tx:
        await budget.prune(tx, START + timedelta(days=1))
    assert await state.count("spending") == 2
    async with state.processor.database.transaction() as tx:
        await budget.prune(tx, START + timedelta(days=4))
    assert await state.count("spending") == 0


async def test_a_spent_budget_makes_the_judge_abstain_until_it_is_renewed(llm: FakeLLM, data_dir: Path) -> None:
    limited = settings(llm, budget={"calls_per_hour": 2}, endpoint={"concurrency": 1})
    async with judge(limited, data_dir) as rig:
        await rig.bench.deliver(*(trajectory(f"t{n}", answer=str(n)) for n in range(3)))
        rewards = await rig.judged(3)
        assert [reward.outcome for reward in rewards] == ["scored", "scored", "abstained"]
        assert rewards[2].reason == "the budget is spent: judge.budget.calls_per_hour = 2"
        await rig.restart()
        await rig.bench.deliver(trajectory("known", answer="0"), trajectory("new", answer="new"))
        outcomes = {reward.trajectory_id: reward.outcome for reward in await rig.judged(5)}
        assert (outcomes["known"], outcomes["new"]) == ("scored", "abstained"), "what is known costs nothing"
        rig.bench.clock.advance(3600)
        await rig.bench.deliver(trajectory("next hour", answer="later"))
        assert (await rig.judged(6))[-1].outcome == "scored"
    assert len(llm.calls) == 3


@pytest.mark.parametrize(
    ("trouble", "spent"),
    [
        (fake_llm.status(429), 120),  # refused before any work: only the second call's usage counts
        (fake_llm.status(400), 0),
        (fake_llm.say("prose", tokens=(7, 3)), 10 + 120),
    ],
    ids=["429", "400", "unreadable"],
)
async def test_tokens_are_counted_as_reported(
    llm: FakeLLM, data_dir: Path, trouble: fake_llm.Behaviour, spent: int
) -> None:
    llm.then(trouble)
    async with judge(settings(llm, budget={"tokens_per_day": 100_000}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        while not rig.rewards:
            await rig.idle()
            rig.bench.clock.advance(1.0)
        assert await left(rig.bench, CallBudget(BudgetSettings(tokens_per_day=0)), START) == {"tokens_per_day": -spent}


@pytest.mark.parametrize(
    ("trouble", "outcome"), [(fake_llm.hang(), "timed_out"), (fake_llm.drop(), "failed")], ids=["hang", "drop"]
)
async def test_a_call_that_may_have_been_billed_stays_counted(
    llm: FakeLLM, data_dir: Path, trouble: fake_llm.Behaviour, outcome: str
) -> None:
    llm.usual = trouble
    limited = settings(
        llm,
        budget={"tokens_per_day": 100_000},
        endpoint={"timeout_s": 0.2, "max_tokens": 500},
        retry={"timeouts_max": 1, "attempts_max": 1},
    )
    async with judge(limited, data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
        spent = -(await left(rig.bench, CallBudget(BudgetSettings(tokens_per_day=0)), START))["tokens_per_day"]
    assert reward.outcome == outcome
    assert 500 < spent < 3000


async def test_a_verdict_that_cannot_be_asked_for_again_is_a_parse_error(llm: FakeLLM, data_dir: Path) -> None:
    llm.usual = fake_llm.prose()
    async with judge(settings(llm, budget={"calls_per_day": 1}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert reward.outcome == "parse_error"
