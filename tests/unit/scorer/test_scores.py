"""A score emits the experiences of its branches, revision by revision."""

from __future__ import annotations

from datetime import timedelta

import pytest
from prometheus_client import REGISTRY

from headrace_schemas import Experience, RewardPart
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.scores import TrajectoryScore, _experiences, _is_ready, _other_sources_answered, _state
from tests.support.streams import START
from tests.support.trajectories import closed
from tests.unit.scorer.conftest import Open, half
from tests.unit.scorer.test_scorer import reward

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
    """Return revision, reward and reason of each experience that these rewards emit."""
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
    """Some algorithms train it: a teacher grades the tokens, and no reward has a part in it."""
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
    """A negative age comes of clocks that differ."""
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
