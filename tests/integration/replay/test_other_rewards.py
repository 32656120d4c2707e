"""The same trajectories with another reward, judge or algorithm: planned, run, and refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Feedback, Span, Trajectory
from headrace_schemas.values.base import utcnow
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings
from tests.integration.replay.conftest import ReplayRig
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.turns import ask, closed, user

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

REWARDS = """
def strict(trajectory, context):
    number = int(trajectory.session_id.removeprefix("s"))
    if number % 8 == 7:
        return None
    return float(number % 3) + context.get("bonus", 0)
"""
COUNT = 22


def lineage(rig: ReplayRig) -> str:
    """The live lineage as it began: its base version."""
    blobs = BlobStore((rig.data_dir / "blobs").as_uri())
    return open_lineage(TrainerSettings(base=str(rig.base), model=rig.model), blobs, SystemClock()).saved.head


def run(model: str, number: int, version: str, **fields: Any) -> Trajectory:
    """One turn of a session `s<number>`, of a task that every fourth session has."""
    trajectory = closed(ask([user(f"question {number}")], session=f"s{number}"), at=float(number))
    (branch,) = trajectory.branches
    spans = tuple(Span.model_validate({**dict(span), "version": version}) for span in branch.spans)
    event_fields = {"model": model, "task_id": f"t{number % 4}", "run_id": str(number), **fields}
    return trajectory.model_copy(update={"branches": (branch.model_copy(update={"spans": spans}),), **event_fields})


@pytest.fixture
async def version(rig: ReplayRig, tmp_path: Path) -> str:
    """A bus with trajectories of this version, one of them held out, and feedback about one that brings a bonus."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    version = lineage(rig)
    runs = [run(rig.model, number, version) for number in range(COUNT)]
    word = Feedback(
        time=utcnow(), feedback_id="f", session_key=runs[1].session_key, msg_ids=runs[1].turn_ids, context={"bonus": 7}
    )
    await rig.send(
        *runs, run(rig.model, COUNT, version, purpose="eval"), run(rig.model, COUNT + 1, "other@0123456789ab"), word
    )
    rig.settings |= {"trainer.batch_experiences": 4, "trainer.batch_experiences_min": 2}
    return version


async def test_another_reward(rig: ReplayRig, version: str, tmp_path: Path) -> None:
    rewards = ["--rewards", f"{tmp_path / 'rewards.py'}:strict"]
    plan = await rig.report("plan", *rewards)
    assert plan["selected"] == COUNT + 2
    assert plan["versions"] == {version: COUNT + 1, "other@0123456789ab": 1}
    assert plan["scored"]["outcomes"] == {"function:strict": {"abstained": 3, "scored": COUNT - 2}}
    assert plan["scored"]["not_trained"] == {"eval": 1}
    assert plan["kinds"] == {"no_reward": 3, "rewarded": COUNT - 2}
    assert plan["training"]["dropped"]["no_reward"] == 3
    assert (
        plan["training"]["trained"] + sum(plan["training"]["dropped"].values()) + plan["training"]["waiting"]
        == COUNT + 1
    )
    assert (plan["cut"], plan["cut_because"]) == ("rules", "the rewards are computed again")

    report = await rig.report("run", "strict", *rewards)
    assert report["training"]["batches"] == plan["training"]["batches"], "run does what plan said"
    assert report["training"]["trained"] == plan["training"]["trained"]
    assert report["training"]["dropped"] == plan["training"]["dropped"]
    assert report["version"].startswith(f"{rig.model}@")
    copied = {
        experience.session_id: experience for experience in await rig.read(Experience, "replay-strict-experiences")
    }
    assert copied["s1"].reward == 8.0, "the bonus came with feedback"
    assert copied["s2"].reward == 2.0
    assert copied["s7"].no_reward == "no_reward", "P6: abstaining is no zero"
    assert f"s{COUNT}" not in copied, "what is held out is not trained"

    grouped = await rig.report(
        "plan", *rewards, "--algorithm", "grpo", "--set", "trainer.group_size=2", "--version", version
    )
    assert grouped["selected"] == COUNT + 1
    assert grouped["training"]["batches"] != plan["training"]["batches"]
    assert "foreign_version" not in grouped["training"]["dropped"]


async def test_another_judge(rig: ReplayRig, version: str) -> None:
    with FakeLLM(verdict(outcome=5, grounding=5, conduct=5, clarity=5)) as llm:
        rig.settings |= {"judge.endpoint.base_url": llm.base_url, "judge.endpoint.model": "judge-2"}
        plan = await rig.report("plan", "--judge", "--version", version)
        calls = len(llm.calls)
        again = await rig.report("plan", "--judge", "--version", version)
        assert len(llm.calls) == calls, "verdicts are not paid for twice"
    assert plan == again
    assert plan["judged"]["outcomes"] == {"judge:helpfulness": {"scored": COUNT}}
    assert plan["kinds"] == {"rewarded": COUNT}


async def test_refusals_leave_nothing_behind(rig: ReplayRig, version: str, tmp_path: Path) -> None:
    wrong = await rig.headrace("run", "broken", "--rewards", f"{tmp_path / 'rewards.py'}:missing", status=2)
    assert "scorer: setting scorer.functions" in wrong
    assert "missing" in wrong
    assert (await rig.headrace("list")).split() == []
    unknown = await rig.headrace("plan", "--of", "nobody", "--rescore", status=2)
    assert "trainer.replays = 'nobody': no such lineage" in unknown
    assert "--cut recorded: the rewards are computed again" in await rig.headrace(
        "plan", "--rescore", "--cut", "recorded", status=2
    )
    assert "has no complete copy of the replay" in await rig.headrace("resume", "broken", status=2)
    assert "lineage = 'main': is the live lineage" in await rig.headrace("run", "main", status=2)
