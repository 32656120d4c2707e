"""Tests of pairwise comparisons of runs of one task, and of the judge as a filter.

They cover the order swap, win rates and their revisions, windows and limits. The filter reads and writes lines, and
pays for no verdict twice.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_judge import replay
from headrace_judge.settings import JudgeSettings
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_schemas import DeadLetter, Reward, Trajectory
from headrace_schemas.programs import JudgedLine
from tests.support import fake_llm
from tests.support.fake_llm import Call, FakeLLM
from tests.support.streams import Rig, judge, settings, trajectory

RUBRIC = """
name = "preference"
mode = "pair"
instructions = "Which run is better?"
[[criteria]]
name = "better"
description = "The better one."
"""


@pytest.fixture
def paired(llm: FakeLLM, tmp_path: Path) -> Callable[..., JudgeSettings]:
    """Return a function that creates settings with a rubric of mode `pair`."""
    path = tmp_path / "preference.toml"
    path.write_text(RUBRIC)
    return lambda **changes: settings(llm, rubrics=[str(path)], **changes)


def preference(winner: str) -> fake_llm.Behaviour:
    return fake_llm.verdict(better=winner)


def by_number(call: Call) -> str:
    """Behave like a judge without position bias: the answer with the higher number wins."""
    first, second = (int(number) for number in re.findall(r"answer (\d+)", call.last))
    winner = "tie" if first == second else "A" if first > second else "B"
    return json.dumps({"reason": "by number", "criteria": {"better": winner}})


def run(name: str, number: int, task: str = "task", **changes: object) -> Trajectory:
    return trajectory(name, answer=f"answer {number}", task_id=task, run_id=name, **changes)


def last(rig: Rig) -> dict[str, Reward]:
    """Return the reward with the highest revision of each trajectory."""
    newest: dict[str, Reward] = {}
    for reward in rig.rewards:
        if reward.trajectory_id not in newest or reward.revision > newest[reward.trajectory_id].revision:
            newest[reward.trajectory_id] = reward
    return newest


async def test_a_judge_that_always_prefers_the_first_decides_nothing(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    """Pitfall 23: the order swap turns position bias into ties, which are recorded as ties."""
    llm.usual = preference("A")
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(*(run(name, number) for number, name in enumerate("xyz")))
        await rig.judged(6)
        await rig.idle()
        rewards = last(rig)
    assert len(llm.calls) == 2 * 3
    assert {name: reward.value for name, reward in rewards.items()} == {"x": 0.5, "y": 0.5, "z": 0.5}
    assert all("order" in str(reward.reason) for reward in rewards.values())


async def test_rewards_are_win_rates(llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]) -> None:
    llm.usual = fake_llm.answer(by_number)
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(run("low", 1), run("middle", 2), run("high", 3), run("also high", 3))
        await rig.judged(12)
        await rig.idle()
        rewards = last(rig)
    values = {name: reward.value for name, reward in rewards.items()}
    assert values == {"low": 0.0, "middle": pytest.approx(1 / 3), "high": 2.5 / 3, "also high": 2.5 / 3}
    assert {reward.source for reward in rewards.values()} == {"judge:preference"}
    assert rewards["high"].criteria == {"better": 2.5 / 3}
    assert len(llm.calls) == 2 * 3, "two runs are equal: three different pairs, and one that need not be asked"


async def test_later_pairs_revise_the_reward(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    """P10: revisions are numbered without gaps, and each revision is a separate event."""
    llm.usual = fake_llm.answer(by_number)
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(run("a", 2), run("b", 1))
        await rig.judged(2)
        await rig.bench.deliver(run("c", 3))
        await rig.judged(6)
        of_a = [(reward.revision, reward.value) for reward in rig.rewards if reward.trajectory_id == "a"]
        assert of_a == [(0, 1.0), (1, 0.5)]
        assert len({reward.event_id for reward in rig.rewards}) == len(rig.rewards) == 6


async def test_only_other_runs_of_the_same_task_are_compared(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    llm.usual = fake_llm.answer(by_number)
    same_run = run("second part", 9).model_copy(update={"run_id": "a"})
    async with judge(paired(judge_eval=True), data_dir) as rig:
        await rig.bench.deliver(
            run("a", 1),
            run("played", 4, purpose="eval"),
            same_run,
            run("other task", 2, task="other"),
            run("other tenant", 3, tenant="else"),
            trajectory("no task"),
        )
        await rig.idle()
        (reward,) = rig.rewards
        assert await rig.bench.count("pairs") == 0
    assert llm.calls == []
    assert (reward.trajectory_id, reward.outcome) == ("no task", "abstained")


async def test_a_run_that_meets_nobody_abstains_and_is_revised_by_a_late_one(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    llm.usual = fake_llm.answer(by_number)
    async with judge(paired(pairs={"wait_s": 60.0, "window_s": 3600.0}), data_dir) as rig:
        await rig.bench.deliver(run("a", 2))
        await rig.tick(59.0)
        assert rig.rewards == []
        await rig.tick(2.0)
        (reward,) = rig.rewards
        assert (reward.outcome, reward.revision) == ("abstained", 0)
        assert reward.reason == "no other run of its task arrived within 60 s"
        await rig.tick(600.0)
        assert len(rig.rewards) == 1
        await rig.bench.deliver(run("b", 1))
        await rig.judged(3)
        assert (last(rig)["a"].revision, last(rig)["a"].value) == (1, 1.0)


async def test_after_its_window_a_run_is_forgotten(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    llm.usual = fake_llm.answer(by_number)
    async with judge(paired(pairs={"wait_s": 60.0, "window_s": 600.0}), data_dir) as rig:
        await rig.bench.deliver(run("a", 2), run("b", 1))
        await rig.judged(2)
        await rig.tick(61.0)
        await rig.tick(540.0)
        assert [await rig.bench.count(table) for table in ("contests", "contestants", "pairs", "jobs")] == [0] * 4
        await rig.bench.deliver(run("c", 3))
        await rig.idle()
        assert len(rig.rewards) == 2


async def test_a_run_stays_while_a_pair_of_it_is_undecided(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    llm.usual = fake_llm.status(503)
    async with judge(paired(pairs={"wait_s": 60.0, "window_s": 60.0}), data_dir) as rig:
        await rig.bench.deliver(run("a", 2), run("b", 1))
        await rig.idle()
        await rig.tick(61.0)
        llm.usual = fake_llm.answer(by_number)
        while len(rig.rewards) < 2:
            await rig.idle()
            rig.bench.clock.advance(10.0)
        assert {name: reward.value for name, reward in last(rig).items()} == {"a": 1.0, "b": 0.0}
        assert [await rig.bench.count(table) for table in ("contests", "contestants", "pairs")] == [0] * 3


async def test_pairs_per_task_are_limited(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_judge.pairwise.PAIRS_PER_TASK_MAX", 3)
    llm.usual = fake_llm.answer(by_number)
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(*(run(f"r{number}", number) for number in range(4)))
        await rig.idle()
        assert await rig.bench.count("pairs") == 3
        await rig.judged(6)
        await rig.tick(601.0)
        rewards = last(rig)
    assert len(llm.calls) == 6
    assert {name: reward.value for name, reward in rewards.items()} == {"r0": 0.0, "r1": 0.5, "r2": 1.0, "r3": None}
    assert rewards["r3"].reason == "its task had all its pairs already (3)"


async def test_a_task_of_all_runs_has_a_bounded_number_of_contestants(
    llm: FakeLLM, paired: Callable[..., JudgeSettings], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decision reads all runs of its contest: with 10,000 runs of one task that is most of the time."""
    monkeypatch.setattr("headrace_judge.pairwise._CONTESTANTS_MAX", 4)
    llm.usual = fake_llm.answer(by_number)
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(*(run(f"r{number}", number) for number in range(8)), run("other", 1, task="another"))
        assert await rig.bench.count("contestants") == 5
        abstained = [reward for reward in last(rig).values() if reward.outcome == "abstained"]
    assert {reward.trajectory_id for reward in abstained} == {f"r{number}" for number in range(4, 8)}
    assert {reward.reason for reward in abstained} == {"its task has 4 other runs that wait for comparison"}


async def test_a_pair_that_cannot_be_decided_leaves_the_others_standing(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    refuse = fake_llm.status(400)
    llm.usual = lambda call: (refuse if "answer 3" in call.last else fake_llm.answer(by_number))(call)
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(run("a", 2), run("b", 1), run("c", 3))
        await rig.until(lambda: set(last(rig)) == {"a", "b", "c"})
        await rig.idle()
        rewards = last(rig)
    assert (rewards["a"].value, rewards["b"].value) == (1.0, 0.0)
    assert (rewards["c"].outcome, rewards["c"].value) == ("failed", None)


async def test_a_restart_in_the_middle_of_a_pair_asks_only_for_the_missing_order(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    llm.then(preference("A"), fake_llm.hang())
    llm.usual = preference("B")
    async with judge(paired(endpoint={"timeout_s": 30.0}), data_dir) as rig:
        await rig.bench.deliver(run("a", 2), run("b", 1))
        await rig.until(lambda: len(llm.calls) == 2)
        await rig.restart()
        rig.bench.clock.advance(30.1)
        await rig.judged(2)
        assert {name: (reward.value, reward.revision) for name, reward in last(rig).items()} == {
            "a": (1.0, 0),
            "b": (0.0, 0),
        }
    assert len(llm.calls) == 3


async def test_runs_of_two_tenants_with_one_id_are_judged_apart(
    llm: FakeLLM, data_dir: Path, paired: Callable[..., JudgeSettings]
) -> None:
    """Single runs of both tenants are judged. In a comparison, the second tenant's run id is refused with a message."""
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(*(trajectory("x", tenant=tenant) for tenant in ("default", "a", "b")))
        assert sorted(reward.tenant for reward in await rig.judged(3)) == ["a", "b", "default"]
    llm.usual = preference("A")
    async with judge(paired(), data_dir) as rig:
        await rig.bench.deliver(*(run(name, at, tenant="a") for at, name in enumerate("xy")))
        await rig.judged(2)
        await rig.bench.deliver(run("x", 2, tenant="b"))
        await rig.idle()
        assert {reward.tenant for reward in rig.rewards} == {"a"}
        assert [letter.reason for letter in rig.bench.sent(DeadLetter)] == ["trajectory_taken"]


async def judged(llm: FakeLLM, data_dir: Path, *runs: Trajectory, **changes: Any) -> tuple[list[Reward], JudgedLine]:
    source = io.BytesIO(b"".join(b"trajectory %s\n" % run.to_json() for run in runs))
    target = io.BytesIO()
    await replay.run(Common(data_dir=data_dir), settings(llm, **changes), Lines(source, target))
    *rewards, last = (line.partition(b" ") for line in target.getvalue().splitlines())
    assert {word for word, _, _ in rewards} <= {b"reward"}
    assert last[0] == b"judged"
    return [Reward.from_json(value) for _, _, value in rewards], JudgedLine.model_validate_json(last[2])


async def test_every_trajectory_is_judged_and_asked_about_once(
    llm: FakeLLM, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_BATCH_MAX", 10)
    monkeypatch.setattr(replay, "_WAITING_MAX", 4)
    runs = [trajectory(f"run-{number}", f"answer {number}") for number in range(24)]
    rewards, report = await judged(llm, data_dir, *runs)
    assert sorted(reward.trajectory_id for reward in rewards) == sorted(run.trajectory_id for run in runs)
    assert report.outcomes == {"judge:helpfulness": {"scored": 24}}
    calls = len(llm.calls)
    again, same = await judged(llm, data_dir, *runs)
    assert same == report
    assert {(item.trajectory_id, item.value) for item in again} == {
        (item.trajectory_id, item.value) for item in rewards
    }
    assert len(llm.calls) == calls, "the second replay found every verdict"


async def test_what_was_judged_by_another_model_is_judged_again(llm: FakeLLM, data_dir: Path) -> None:
    await judged(llm, data_dir, trajectory("run"))
    calls = len(llm.calls)
    await judged(llm, data_dir, trajectory("run"), endpoint={"model": "judge-2"})
    assert len(llm.calls) == calls + 1
