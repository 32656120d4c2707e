"""Tests that a trajectory which cannot be scored fails alone with a reason, and all others get their experiences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import insert, text, update

from headrace_schemas import DeadLetter, Experience, Feedback, Reward, Trajectory
from headrace_scorer import schema, scores, scoring, upkeep
from headrace_scorer.functions import worker
from headrace_scorer.functions.outcomes import CallRequest, Outcome
from tests.support.turns import ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, Rig, half, rematch_of


def _validation_error() -> ValidationError:
    try:
        TypeAdapter(int).validate_python("x")
    except ValidationError as error:
        return error
    raise AssertionError("unreachable")


def _unicode_error() -> UnicodeEncodeError:
    return UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed")


ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "ValidationError": _validation_error,
    "UnicodeEncodeError": _unicode_error,
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}


def several(count: int) -> list[Trajectory]:
    return [closed(ask([user("q")], session=f"s{n}"), session=f"s{n}") for n in range(count)]


def poison(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, victim: Trajectory, error: Exception) -> None:
    """Make `where.name` raise `error` for the trajectory `victim`."""
    real = getattr(where, name)

    def is_victim(arguments: Sequence[object]) -> bool:
        items = [
            item for argument in arguments for item in (argument if isinstance(argument, list | dict) else [argument])
        ]
        ids = [getattr(getattr(item, "trajectory", item), "trajectory_id", item) for item in items]
        return victim.trajectory_id in [argument for argument in ids if isinstance(argument, str)]

    if asyncio.iscoroutinefunction(real):

        async def awaited(*arguments: object, **named: object) -> object:
            if is_victim(arguments):
                raise error
            return await real(*arguments, **named)

        monkeypatch.setattr(where, name, awaited)
        return

    def planted(*arguments: object, **named: object) -> object:
        if is_victim(arguments):
            raise error
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, planted)


def rewarded_runs(rig: Rig) -> set[str]:
    return {experience.trajectory_id for experience in rig.stream.sent(Experience)}


def named(rig: Rig) -> list[tuple[str, int | None]]:
    return [(letter.reason, letter.source_offset) for letter in rig.stream.sent(DeadLetter)]


@pytest.mark.parametrize("kind", ERRORS)
async def test_results_that_cannot_be_entered(open_scorer: Open, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with open_scorer(half) as rig:
        trajectories = several(5)
        await rig.stream.deliver(*trajectories)
        poison(monkeypatch, scoring, "function_rewards", trajectories[2], ERRORS[kind]())
        await rig.run_functions()
        assert rewarded_runs(rig) == {
            trajectory.trajectory_id for trajectory in trajectories if trajectory is not trajectories[2]
        }
        assert named(rig) == [("scoring_failed", 2)]
        assert await rig.stream.count("jobs") == 0, "nothing comes back after a restart"
        rig.stream.clock.advance(10_000)
        await rig.pass_time(1)
        assert len(named(rig)) == 1


@pytest.mark.parametrize("kind", ERRORS)
async def test_experiences_that_cannot_be_made(open_scorer: Open, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with open_scorer(half) as rig:
        trajectories = several(5)
        await rig.stream.deliver(*trajectories)
        poison(monkeypatch, scores, "_experiences", trajectories[2], ERRORS[kind]())
        await rig.run_functions()
        assert len(rewarded_runs(rig)) == 4
        failed = [reward.trajectory_id for reward in rig.stream.sent(Reward) if reward.outcome == "failed"]
        assert failed == [trajectories[2].trajectory_id]
        assert await rig.stream.count("jobs") == 0
        await rig.pass_time(700)
        assert named(rig) == [("scoring_failed", 2)], "once its wait is over"


@pytest.mark.parametrize("kind", ERRORS)
async def test_a_function_call_that_breaks(open_scorer: Open, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with open_scorer(half) as rig:
        trajectories = several(5)
        real = rig.pool.call

        async def call(request: CallRequest, trajectory: bytes) -> Outcome:
            if trajectories[2].trajectory_id.encode() in trajectory:
                raise ERRORS[kind]()
            return await real(request, trajectory)

        monkeypatch.setattr(rig.pool, "call", call)
        await rig.deliver(*trajectories)
        outcomes = {reward.trajectory_id: reward.outcome for reward in rig.stream.sent(Reward)}
        assert outcomes == {item.trajectory_id: "scored" for item in trajectories} | {
            trajectories[2].trajectory_id: "failed"
        }


async def in_database(rig: Rig, trajectories: Sequence[Trajectory]) -> None:
    """Put the jobs of `trajectories` into the database only, as after a restart."""
    await rig.stream.deliver(*trajectories)
    while not rig.scoring._waiting.empty():
        rig.scoring._waiting.get_nowait()
    rig.scoring._leased.clear()
    rig.stream.clock.advance(1000)


@pytest.mark.parametrize("kind", ERRORS)
async def test_a_job_that_cannot_be_loaded(open_scorer: Open, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with open_scorer(half, reward_wait_s=10_000) as rig:
        trajectories = several(5)
        await in_database(rig, trajectories)
        poison(monkeypatch, rig.scoring._cache, "get", trajectories[2], ERRORS[kind]())
        await rig.scoring.lease_jobs(rig.stream.processor)
        await rig.run_functions()
        assert len(rewarded_runs(rig)) == 4
        assert named(rig) == [("scoring_failed", 2)]
        assert await rig.stream.count("jobs") == 0


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\xfe", b"[" * 50_000, b'{"functions": 7}'], ids=range(5))
async def test_a_job_with_a_damaged_payload(open_scorer: Open, payload: bytes) -> None:
    async with open_scorer(half, reward_wait_s=10_000) as rig:
        trajectories = several(5)
        await in_database(rig, trajectories)
        of_victim = schema.stream.jobs.c.job_id.startswith(trajectories[2].trajectory_id)
        async with rig.stream.processor.database.transaction() as tx:
            await tx.execute(update(schema.stream.jobs).where(of_victim).values(payload=payload))
        await rig.scoring.lease_jobs(rig.stream.processor)
        await rig.run_functions()
        assert len(rewarded_runs(rig)) == 4
        assert named(rig) == [("scoring_failed", 2)]
        assert await rig.stream.count("jobs") == 0


async def test_a_job_that_ends_every_process_fails_by_name(open_scorer: Open) -> None:
    async with open_scorer(half, reward_wait_s=10_000) as rig:
        trajectories = several(3)
        await in_database(rig, trajectories)
        of_victim = schema.stream.jobs.c.job_id.startswith(trajectories[1].trajectory_id)
        async with rig.stream.processor.database.transaction() as tx:
            await tx.execute(update(schema.stream.jobs).where(of_victim).values(attempts=scoring._LEASES_MAX))
        await rig.scoring.lease_jobs(rig.stream.processor)
        await rig.run_functions()
        failed = [reward for reward in rig.stream.sent(Reward) if reward.outcome == "failed"]
        assert [reward.trajectory_id for reward in failed] == [trajectories[1].trajectory_id]
        assert "10 processes ended" in (failed[0].reason or "")


async def test_a_process_that_ends_on_purpose_gives_its_jobs_back(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        await in_database(rig, several(1))
        for _ in range(scoring._LEASES_MAX + 2):
            await rig.scoring.lease_jobs(rig.stream.processor)
            assert rig.scoring._waiting.qsize() == 1
            await rig.scoring._end_leases(rig.stream.processor)
            rig.scoring._leased.clear()
            rig.scoring._waiting.get_nowait()
        await rig.scoring.lease_jobs(rig.stream.processor)
        await rig.run_functions()
        assert [reward.outcome for reward in rig.stream.sent(Reward)] == ["scored"]


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("timer", ["emit_overdue", "rematch"])
async def test_timers(open_scorer: Open, monkeypatch: pytest.MonkeyPatch, kind: str, timer: str) -> None:
    async with open_scorer(reward_wait_s=10) as rig:
        trajectories = several(5)
        await rig.stream.deliver(*trajectories)
        poison(monkeypatch, scores, "_experiences", trajectories[2], ERRORS[kind]())
        if timer == "emit_overdue":
            await rig.pass_time(11)
        else:
            async with rig.stream.processor.database.transaction() as tx:
                await tx.execute(update(schema.trajectories).values(rematch=True, settle_ms=0))
            await rig.stream.step(rematch_of(rig))
        assert len(rewarded_runs(rig)) == 4
        assert named(rig) == [("scoring_failed", 2)]
        await rig.pass_time(11)
        await rig.stream.step(rematch_of(rig))
        assert len(named(rig)) == 1, "it is not selected again"


async def test_a_judge_whose_state_is_damaged_does_not_hide_the_others(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        key = {"tenant": "default", "judged_by": "x", "changed_ms": 0}
        now_ms = int(rig.stream.clock.now().timestamp() * 1000)
        async with rig.stream.processor.database.transaction() as tx:
            await tx.execute(insert(schema.agreement).values(**{**key, "changed_ms": now_ms}, source="a", state="{"))
            await tx.execute(insert(schema.agreement).values(**{**key, "changed_ms": now_ms}, source="b", state="{}"))
        await rig.stream.step(upkeep.measure)
        async with rig.stream.processor.database.transaction() as tx:
            left = (await tx.execute(text("SELECT source FROM agreement"))).scalars().all()
        assert left == ["b"]


def enormous(trajectory: object) -> dict[str, float]:
    del trajectory
    return {"a": 1.7e308, "b": 1.7e308}


def first(trajectory: object) -> float:
    del trajectory
    return 1.7e308


def second(trajectory: object) -> float:
    del trajectory
    return 1.7e308


def nul(trajectory: object) -> float:
    del trajectory
    raise ValueError("a NUL \x00 and a surrogate \ud83d")


@pytest.mark.parametrize(
    ("functions", "settings"),
    [((enormous,), {}), ((first, second), {"combine": "sum"}), ((nul,), {})],
    ids=["mean overflows", "sum overflows", "exception text"],
)
async def test_what_was_seen_of_reward_functions(
    open_scorer: Open, functions: Sequence[Callable[..., object]], settings: dict[str, Any]
) -> None:
    """Each function's failure is a reward with the outcome `failed`, and the next trajectory is scored."""
    async with open_scorer(half, *functions, **settings) as rig:
        await rig.deliver(*several(2))
        outcomes = [(reward.source, reward.outcome) for reward in rig.stream.sent(Reward)]
        assert len(outcomes) == 2 * (1 + len(functions))
        assert [outcome for outcome in outcomes if outcome[0] != "function:half"] == [
            (f"function:{function.__name__}", "failed") for function in functions
        ] * 2
        rig.pool.use([half])
        third = closed(ask([user("q")], session="third"), session="third")
        await rig.deliver(third)
        assert third.trajectory_id in rewarded_runs(rig)


async def test_parts_that_overflow_name_their_trajectory(open_scorer: Open) -> None:
    """The experience would have one reward part more than its limit, although each accepted event is valid."""
    async with open_scorer(half) as rig:
        turn, other = ask([user("q")]), ask([user("p")], session="other")
        await rig.stream.deliver(closed(turn), closed(other, session="other"))
        parts = [{f"{name}{n}": 1.0 for n in range(32)} for name in "ab"]
        for number, part in enumerate(parts):
            event: Feedback = feedback("s", turn, value=1.0).model_copy(
                update={"feedback_id": f"f{number}", "parts": part, "source": f"x{number}"}
            )
            await rig.stream.deliver(event)
        await rig.run_functions()
        assert len(rewarded_runs(rig)) == 2 or [reason for reason, _ in named(rig)] in (
            ["scoring_failed"],
            ["handler_error"],
        )
        assert await rig.stream.count("jobs") == 0


async def test_no_tenant_waits_for_the_backlog_of_another(open_scorer: Open) -> None:
    """One tenant has a full queue and further jobs in the database. The jobs of two others are among the next calls."""
    async with open_scorer(half) as rig:
        flood = [_of("flooder", n) for n in range(300)]
        await rig.stream.deliver(*flood)
        quiet = [_of(name, 0) for name in ("quiet", "calm")]
        await rig.stream.deliver(*quiet)
        order = [rig.scoring._waiting.get_nowait() for _ in range(4)]
        assert {work.tenant for work in order} == {"flooder", "quiet", "calm"}


async def test_jobs_in_the_database_are_leased_for_each_tenant_in_turn(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        flood = [_of("flooder", n) for n in range(150)]
        await in_database(rig, [*flood, *[_of(f"t{name}", 0) for name in range(5)]])
        await rig.scoring.lease_jobs(rig.stream.processor)
        tenants = [rig.scoring._waiting.get_nowait().tenant for _ in range(rig.scoring._waiting.qsize())]
        assert {f"t{name}" for name in range(5)} <= set(tenants)
        assert len(tenants) <= 128


def _of(tenant: str, number: int) -> Trajectory:
    turn = ask([user("q")], session=f"s{number}").model_copy(update={"tenant": tenant})
    return closed(turn, session=f"s{number}").model_copy(update={"tenant": tenant})


async def test_a_backlog_is_leased_as_fast_as_it_is_done(open_scorer: Open) -> None:
    """A lease reports that more jobs wait, so the worker does not sleep between two leases."""
    async with open_scorer(half) as rig:
        await in_database(rig, several(200))
        looks = 0
        while await rig.scoring.lease_jobs(rig.stream.processor):
            await rig.run_functions()
            looks += 1
        await rig.run_functions()
        assert (len(rewarded_runs(rig)), looks) == (200, 3)


def test_an_exception_whose_text_cannot_be_encoded_is_a_failed_call() -> None:
    outcome = worker.run(nul, CallRequest(function="nul", feedback=(), context={}), closed().to_json())
    assert outcome.outcome == "failed"


async def test_the_bytes_of_waiting_jobs_are_bounded_and_each_tenant_has_its_turn(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 runs of the largest size would take 4 GB. What does not fit stays in the database and is called later."""
    size = len(_of("flooder", 0).to_json())
    monkeypatch.setattr(scoring, "_BYTES_MAX", 10 * size)
    async with open_scorer(half) as rig:
        waiting = rig.scoring._waiting
        await rig.stream.deliver(*[_of("flooder", n) for n in range(60)])
        assert 9 <= waiting.qsize() <= 11
        await rig.stream.deliver(_of("quiet", 0))
        assert waiting.count("quiet") == 1, "a tenant without a job has room"
        await rig.run_functions()
        looks = 0
        while await rig.scoring.lease_jobs(rig.stream.processor):
            assert 9 <= waiting.qsize() <= 11
            await rig.run_functions()
            looks += 1
        await rig.run_functions()
        assert (len(rewarded_runs(rig)), looks) == (61, 5)
        assert await rig.stream.count("jobs") == 0


async def test_a_job_that_is_larger_than_all_room_runs_alone(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_BYTES_MAX", 100)
    async with open_scorer(half) as rig:
        await in_database(rig, [_of("flooder", n) for n in range(3)])
        for _ in range(3):
            await rig.scoring.lease_jobs(rig.stream.processor)
            assert rig.scoring._waiting.qsize() == 1
            await rig.run_functions()
        assert len(rewarded_runs(rig)) == 3
