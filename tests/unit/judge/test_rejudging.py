"""The judge as a filter reads and writes lines, and pays for no verdict twice."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from headrace_judge import rejudging
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_schemas import Reward, Trajectory
from headrace_schemas.programs.replay import JudgedLine
from tests.support.fake_llm import FakeLLM
from tests.support.judge_rig import settings, trajectory


async def judged(llm: FakeLLM, data_dir: Path, *runs: Trajectory, **changes: Any) -> tuple[list[Reward], JudgedLine]:
    source = io.BytesIO(b"".join(b"trajectory %s\n" % run.to_json() for run in runs))
    target = io.BytesIO()
    await rejudging.run(Common(data_dir=data_dir), settings(llm, **changes), Lines(source, target))
    *rewards, last = (line.partition(b" ") for line in target.getvalue().splitlines())
    assert {word for word, _, _ in rewards} <= {b"reward"}
    assert last[0] == b"judged"
    return [Reward.from_json(value) for _, _, value in rewards], JudgedLine.model_validate_json(last[2])


async def test_every_trajectory_is_judged_and_asked_about_once(
    llm: FakeLLM, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejudging, "_BATCH_MAX", 10)
    monkeypatch.setattr(rejudging, "_WAITING_MAX", 4)
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
