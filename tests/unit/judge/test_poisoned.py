"""A run that cannot be judged fails alone and by name; the judge lives and the other runs are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import update

from headrace_judge import tables
from headrace_judge.call_budget import BudgetLimit, CallBudget, Reservation, TenantBreakers
from headrace_judge.model_judge import ModelJudge
from headrace_judge.pairwise import PairwiseComparisons
from headrace_judge.settings import BudgetSettings
from headrace_judge.tables import STREAM, Subject
from headrace_schemas import DeadLetter
from headrace_schemas.values.ids import session_key
from tests.support import fake_llm
from tests.support.fake_llm import Call, FakeLLM, Reply
from tests.support.judge_rig import Rig, judge, settings, trajectory
from tests.support.streams import ManualClock
from tests.support.turns import START

ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}
SCORES = {"outcome": 5, "grounding": 4, "conduct": 3, "clarity": 2}
NAMES = [f"t{number}" for number in range(5)]


async def judge_all(rig: Rig, count: int = 5) -> dict[str, str]:
    """The outcome of each run, with the clock moved over every wait between tries."""

    def settled() -> bool:
        if not REGISTRY.get_sample_value("headrace_judge_in_progress"):
            rig.bench.clock.advance(5)
        return len(rig.rewards) + len(rig.bench.sent(DeadLetter)) >= count

    await rig.until(settled, "all runs")
    return {reward.trajectory_id: reward.outcome for reward in rig.rewards}


@pytest.mark.parametrize(
    "reason", ["bad \ud83d end", "NUL \x00", "x" * 50_000, "\x1b[31m", "\u202e"], ids=lambda text: ascii(text)[:20]
)
async def test_whatever_text_an_endpoint_answers(llm: FakeLLM, data_dir: Path, database_url: str, reason: str) -> None:
    """Put JSON escapes into the answer's JSON for one run of five."""
    text = json.dumps({"reason": reason, "criteria": SCORES})

    def reply(call: Call) -> Reply:
        if "poison" in call.prompt:
            return Reply(fake_llm.completion(text))
        return Reply(fake_llm.completion(json.dumps({"reason": "because", "criteria": SCORES})))

    llm.usual = reply
    async with judge(settings(llm), data_dir, database_url) as rig:
        await rig.bench.deliver(*[trajectory(name, answer="poison" if name == "t2" else name) for name in NAMES])
        assert await judge_all(rig) == dict.fromkeys(NAMES, "scored")
        await rig.restart()
        assert await rig.bench.count("jobs") == 0


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", ["single", "store", "reward"])
async def test_a_poisoned_run_fails_alone(
    llm: FakeLLM, data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    if stage == "single":
        single = ModelJudge.single

        async def judged(self: ModelJudge, rubric: Any, run: Any, tenant: str) -> Any:
            if "poison" in repr(run):
                raise ERRORS[kind]()
            return await single(self, rubric, run, tenant)

        monkeypatch.setattr(ModelJudge, "single", judged)
    elif stage == "store":
        keep = tables.store

        async def failing_store(tx: Any, now: Any, question: str, verdict: Any) -> None:
            if verdict.reason == "poison":
                raise ERRORS[kind]()
            await keep(tx, now, question, verdict)

        monkeypatch.setattr(tables, "store", failing_store)
    else:
        reward = Subject.reward

        def failing_reward(self: Subject, judgement: Any, *rest: Any) -> Any:
            if self.trajectory_id == "t2" and judgement.outcome == "scored":
                raise ERRORS[kind]()
            return reward(self, judgement, *rest)

        monkeypatch.setattr(Subject, "reward", failing_reward)

    def reply(call: Call) -> Reply:
        reason = "poison" if "poison" in call.prompt else "because"
        return Reply(fake_llm.completion(json.dumps({"reason": reason, "criteria": SCORES})))

    llm.usual = reply
    async with judge(settings(llm, retry={"attempts_max": 3}), data_dir, database_url) as rig:
        await rig.bench.deliver(*[trajectory(name, answer="poison" if name == "t2" else name) for name in NAMES])
        outcomes = await judge_all(rig)
        assert outcomes == {**dict.fromkeys(NAMES, "scored"), "t2": "failed"}
        assert await rig.bench.count("jobs") == 0, "nothing comes back after a restart"


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 50_000, b"{}"], ids=range(5))
async def test_a_job_with_a_damaged_payload_is_dead_lettered(llm: FakeLLM, data_dir: Path, payload: bytes) -> None:
    async with judge(settings(llm), data_dir) as rig:
        await rig.stop()
        await rig.bench.deliver(*map(trajectory, NAMES))
        async with rig.bench.processor.database.transaction() as tx:
            names = (await tx.execute(STREAM.jobs.select())).mappings().all()
            victim = next(row["job_id"] for row in names if b'"t2"' in row["payload"])
            await tx.execute(update(STREAM.jobs).where(STREAM.jobs.c.job_id == victim).values(payload=payload))
        await rig.restart()
        outcomes = await judge_all(rig)
        assert outcomes == {name: "scored" for name in NAMES if name != "t2"}
        assert [letter.reason for letter in rig.bench.sent(DeadLetter)] == ["judging_failed"]
        assert await rig.bench.count("jobs") == 0


@pytest.mark.parametrize("kind", ERRORS)
async def test_a_poisoned_deadline_ends_alone(
    llm: FakeLLM, data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    deadline = PairwiseComparisons.deadline

    async def ended(self: PairwiseComparisons, tx: Any, now: Any, job: Any, judged_by: Any) -> Any:
        if Subject.model_validate_json(job.payload).trajectory_id == "t2":
            raise ERRORS[kind]()
        return await deadline(self, tx, now, job, judged_by)

    monkeypatch.setattr(PairwiseComparisons, "deadline", ended)
    folder = data_dir / "rubrics"
    folder.mkdir(parents=True)
    (folder / "better.toml").write_text(_PAIR)
    async with judge(settings(llm, rubrics=[str(folder / "better.toml")]), data_dir, database_url) as rig:
        await rig.bench.deliver(*[trajectory(name, task_id=f"task-{name}") for name in NAMES])
        await rig.tick(100_000)
        assert {reward.trajectory_id for reward in rig.rewards} == {name for name in NAMES if name != "t2"}
        assert [letter.reason for letter in rig.bench.sent(DeadLetter)] == ["judging_failed"]


_PAIR = """
name = "better"
mode = "pair"
instructions = "Which run is better?"

[[criteria]]
name = "outcome"
description = "Whether the task was done."
weight = 1
"""


def _of(tenant: str, name: str, answer: str) -> Any:
    return trajectory(name, answer=answer, tenant=tenant, session_key=session_key(tenant, name))


async def test_runs_of_one_tenant_that_the_endpoint_fails_on_do_not_stop_another(llm: FakeLLM, data_dir: Path) -> None:
    """The clock is fixed, so a job that waits for a breaker waits forever."""

    def reply(call: Call) -> Reply:
        if "poison" in call.prompt:
            return Reply(status=500)
        return Reply(fake_llm.completion(json.dumps({"reason": "because", "criteria": SCORES})))

    llm.usual = reply
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(*[_of("flooder", f"bad{n}", f"poison {n}") for n in range(20)])
        await rig.bench.deliver(*[_of("other", f"good{n}", f"answer {n}") for n in range(5)])
        await rig.judged(5)
    assert {reward.trajectory_id for reward in rig.rewards} == {f"good{n}" for n in range(5)}


def test_each_tenant_has_its_breaker() -> None:
    breakers = TenantBreakers(ManualClock(), 1.0)
    breakers.of("a").failed(None)
    assert (breakers.of("a").admits(0, 8), breakers.of("b").admits(0, 8)) == (0, 8)


async def test_tenants_of_the_last_period_share_the_budget(llm: FakeLLM, data_dir: Path) -> None:
    async with judge(settings(llm), data_dir) as rig:
        budget = CallBudget(BudgetSettings(calls_per_hour=10))

        async def reserve(tenant: str) -> Reservation | BudgetLimit:
            async with rig.bench.processor.database.transaction() as tx:
                return await budget.reserve(tx, START, 1, tenant)

        assert isinstance(await reserve("quiet"), Reservation)
        spent = [await reserve("flooder") for _ in range(20)]
        assert sum(isinstance(result, Reservation) for result in spent) == 5
        assert "this is the part of one of 2 tenants" in str(spent[-1])
        assert [type(await reserve("quiet")) for _ in range(5)] == [Reservation] * 4 + [BudgetLimit]
