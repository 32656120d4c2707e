"""Tests of edits, preferences and rewards of single answers: added to the experience, revised and withdrawn.

The reward policy combines sources. A source without a score is ignored, and never counts as zero (P6).
"""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common
from headrace_schemas import Experience, Feedback, Message, Reward, RewardResult
from headrace_schemas.events.feedback import Outcome
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_schemas.values import ids
from headrace_schemas.values.ids import matches
from headrace_scorer import api
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.reward_policy import PARTS_MAX, RewardPolicy, SourceReward
from headrace_scorer.settings import ScorerSettings
from tests.feedback.world import Scene, trajectory
from tests.support.turns import feedback
from tests.unit.scorer.conftest import Open, Rig, rematch_of

A, B = (ids.response_id(ids.session_key("default", "s")) for _ in range(2))
RUN = trajectory(Scene("s", "task", {A: 2, B: 1}))
"""Branch 0 holds the first answers of both turns, branch 1 the second answer of the first turn."""


def about(turn: str, **fields: Any) -> Feedback:
    return feedback("s", **{"value": None, "msg_ids": (turn,), **fields})


def edit(text: str, turn: str = A, **fields: Any) -> Feedback:
    return about(turn, edit=Message(role="assistant", content=text), **fields)


def prefer(better: int, **fields: Any) -> Feedback:
    sides = ComparedAnswer(turn_id=A, choice=better), ComparedAnswer(turn_id=A, choice=1 - better)
    return about(A, preference=Preference(chosen=sides[0], rejected=sides[1]), **fields)


def newest(rig: Rig) -> list[Experience]:
    """Return the last revision of the experience of each branch."""
    latest = {experience.branch_index: experience for experience in rig.stream.sent(Experience)}
    return [latest[index] for index in sorted(latest)]


async def test_an_edit_alone_makes_an_experience_with_its_branch(open_scorer: Open) -> None:
    async with open_scorer(reward_wait_s=60) as rig:
        await rig.deliver(edit("better"), RUN)
        assert rig.experiences() == []
        await rig.pass_time(61)
        first, second = newest(rig)
        assert (first.reward, first.no_reward, first.branch) == (None, "no_reward", RUN.branches[0])
        assert [(item.turn_id, item.choice, item.message.text) for item in first.edits] == [(A, 0, "better")]
        assert (second.branch, second.edits) == (None, ()), "the other answer was not edited"
        assert rig.stream.sent(Reward) == [], "an edit is no reward"


async def test_an_edit_is_revised_and_taken_back_with_the_experience(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        await rig.deliver(RUN, feedback("s", value=1.0))
        edits = [edit("one"), edit("two"), edit("two"), edit("hers", rater="ann")]
        for item in edits:
            await rig.deliver(item)
        await rig.deliver(about(A, withdrawn=True, kind="edit"))
        await rig.deliver(about(A, withdrawn=True, kind="edit", rater="ann"))
        texts = [
            [edit.message.text for edit in item.edits] for item in rig.stream.sent(Experience) if not item.branch_index
        ]
        assert texts == [[], ["one"], ["two"], ["two", "hers"], ["hers"], []]
        revisions = [item.revision for item in rig.stream.sent(Experience) if not item.branch_index]
        assert revisions == list(range(6)), "the same words again change nothing"
        assert newest(rig)[0].reward == 1.0


async def test_a_preference_between_two_choices_reaches_both_branches_and_turns_round(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        await rig.deliver(RUN, feedback("s", value=1.0), prefer(1))
        sides = [
            [(side.side, side.turn_id, side.choice) for side in experience.preferences] for experience in newest(rig)
        ]
        assert sides == [[("rejected", A, 0)], [("chosen", A, 1)]]
        (name,) = {side.preference_id for experience in newest(rig) for side in experience.preferences}
        await rig.deliver(prefer(0))
        assert [[side.side for side in experience.preferences] for experience in newest(rig)] == [
            ["chosen"],
            ["rejected"],
        ]
        assert {side.preference_id for experience in newest(rig) for side in experience.preferences} == {name}
        await rig.deliver(prefer(1, withdrawn=True))
        assert [experience.preferences for experience in newest(rig)] == [(), ()]
        assert [experience.reward for experience in newest(rig)] == [1.0, 1.0]


async def test_what_is_said_of_one_answer_is_its_branch_alone(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        await rig.deliver(RUN, about(A, value=1.0, level="response", choice=1))
        await rig.pass_time(700)
        first, second = newest(rig)
        assert (first.reward, second.reward) == (None, 1.0)
        (reward,) = rig.stream.sent(Reward)
        assert (reward.turn_id, reward.choice) == (A, 1)
        assert (first.turn_rewards, [turn_reward.value for turn_reward in second.turn_rewards]) == ((), [1.0])


async def test_turn_rewards_stand_beside_the_reward_of_the_run(open_scorer: Open) -> None:
    async with open_scorer(weights={"user": 3.0, "*": 1.0}) as rig:
        await rig.deliver(RUN, feedback("s", value=1.0))
        await rig.deliver(about(A, value=0.0, level="turn"), about(A, value=1.0, level="turn", source="user"))
        await rig.deliver(about(B, value=0.5, level="turn"))
        first, second = newest(rig)
        assert {turn_reward.turn_id: turn_reward.value for turn_reward in first.turn_rewards} == {A: 0.75, B: 0.5}
        assert {turn_reward.turn_id: turn_reward.value for turn_reward in second.turn_rewards} == {A: 0.75}
        assert first.reward == 1.0, "a source's word on the run goes before its words on turns"
        await rig.deliver(about(B, level="turn", withdrawn=True))
        assert [turn_reward.turn_id for turn_reward in newest(rig)[0].turn_rewards] == [A]


async def test_a_reward_may_be_the_sum_of_its_parts(open_scorer: Open) -> None:
    async with open_scorer(combine="sum", weights={"feedback:tone": 0.5, "*": 2.0}) as rig:
        await rig.deliver(RUN, feedback("s", value=None, parts={"tone": 1.0, "truth": 0.25}))
        experience = newest(rig)[0]
        assert experience.reward == 1.0
        assert [(part.source, part.value, part.weight) for part in experience.parts] == [
            ("feedback:tone", 1.0, 0.5),
            ("feedback:truth", 0.25, 2.0),
        ]


async def rematch(rig: Rig) -> None:
    """Match feedback about tasks in one step, whose limit is far above the number of runs here."""
    await rig.stream.step(rematch_of(rig))


async def test_feedback_about_a_task_is_about_its_runs_of_before_and_after(open_scorer: Open) -> None:
    def of_task(value: float | None, partition: int = 0, **fields: Any) -> Feedback:
        return feedback("any", value=value, level="task", task_id="task", partition=partition, **fields)

    runs = [trajectory(Scene(name, "task", {ids.response_id(ids.session_key("default", name)): 1})) for name in "xyz"]
    async with open_scorer() as rig:
        await rig.deliver(runs[0])
        await rig.deliver(of_task(0.5), feedback("other", value=0.0, level="task", task_id="other", partition=0))
        await rematch(rig)
        await rig.stream.deliver(of_task(1.0, partition=1), partition=1)
        await rig.deliver(runs[1], feedback("y", value=1.0))
        await rematch(rig)
        rewards = {experience.session_id: experience.reward for experience in rig.stream.sent(Experience)}
        assert rewards == {"x": 0.5, "y": 1.0}, "what is said of a session goes before what is said of its task"
        await rig.deliver(runs[2], of_task(None, withdrawn=True))
        await rematch(rig)
        assert {experience.session_id: experience.reward for experience in rig.stream.sent(Experience)} == {
            "x": None,
            "y": 1.0,
            "z": None,
        }


async def test_the_ledger_shows_everything_as_what_it_is(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        await rig.deliver(RUN, edit("one", rater="ann"), prefer(1), about(A, value=0.0, level="turn"))
        await rig.deliver(about(A, withdrawn=True, kind="edit", rater="ann", comment="a slip"))
        common = Common.model_validate({"security": {"internal_key": "key"}})
        served = web.app({}, api.routes(common, FunctionPool(ScorerSettings()), rig.stream.processor.database))
        headers = {"Authorization": "Bearer key"}
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://scorer", headers=headers) as http:
            body = (await http.get(f"/ledger/{RUN.trajectory_id}")).json()
        edits = [(entry["revision"], entry["outcome"], entry["rater"], entry["reason"]) for entry in body["edits"]]
        assert edits == [(0, "given", "ann", None), (1, "withdrawn", "ann", "a slip")]
        assert body["edits"][0]["message"] == {"role": "assistant", "content": "one"}
        assert {(entry["choice"], entry["side"]) for entry in body["preferences"]} == {(0, "rejected"), (1, "chosen")}
        assert [(entry["turn_id"], entry["choice"], entry["value"]) for entry in body["rewards"]] == [(A, None, 0.0)]


async def test_a_function_may_say_what_single_turns_are_worth(open_scorer: Open) -> None:
    def steps(context: dict[str, Any]) -> RewardResult:
        values = {A: 0.25, "unknown": 1.0} if "late" not in context else {B: 0.5}
        return RewardResult(value=1.0 if "late" not in context else None, turns=values)

    async with open_scorer(steps) as rig:
        await rig.deliver(RUN)
        first = newest(rig)[0]
        assert (first.reward, {item.turn_id: item.value for item in first.turn_rewards}) == (1.0, {A: 0.25})
        await rig.deliver(feedback("s", value=None, context={"late": True}))
        again = newest(rig)[0]
        assert (again.reward, {item.turn_id: item.value for item in again.turn_rewards}) == (0.5, {B: 0.5})
        outcomes = {(item.turn_id, item.revision): (item.outcome, item.value) for item in rig.stream.sent(Reward)}
        assert outcomes[A, 1] == ("withdrawn", None), "it does not say so any more"
        assert outcomes[None, 1] == ("abstained", None)


EQUAL = RewardPolicy({"*": 1.0})


def scored(source: str, value: float, turn_id: str | None = None) -> SourceReward:
    return SourceReward(source, turn_id, "scored", value)


def silent(source: str, outcome: Outcome) -> SourceReward:
    return SourceReward(source, None, outcome, None)


def reward(policy: RewardPolicy, *rewards: SourceReward, turns: tuple[str, ...] = ("t",)) -> float | None:
    return policy.branch_reward(rewards, turns, rewarded=False).reward


def test_the_reward_is_the_weighted_mean_of_what_scored() -> None:
    policy = RewardPolicy({"judge:*": 3.0, "*": 1.0})
    reward_of_branch = policy.branch_reward([scored("judge:a", 1.0), scored("feedback", 0.0)], ["t"], rewarded=False)
    assert reward_of_branch.reward == 0.75
    assert [(part.source, part.value, part.weight) for part in reward_of_branch.parts] == [
        ("feedback", 0.0, 0.25),
        ("judge:a", 1.0, 0.75),
    ]


@pytest.mark.parametrize("outcome", ["abstained", "failed", "parse_error", "timed_out", "withdrawn"])
def test_p6_no_score_is_not_zero(outcome: Outcome) -> None:
    assert reward(EQUAL, scored("a", 0.5), silent("b", outcome)) == 0.5
    assert reward(EQUAL, silent("b", outcome)) is None


def test_the_first_pattern_that_fits_gives_the_weight() -> None:
    policy = RewardPolicy({"function:a": 2.0, "function:*": 1.0, "other": 0.5})
    assert [policy.weight(name) for name in ("function:a", "function:b", "other", "unknown")] == [2.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_about_the_very_answer_goes_before_what_is_about_its_turn(turned: bool) -> None:
    answer = SourceReward("a", "t", "scored", 1.0, choice=0)
    rewards = [scored("a", 0.0, "t"), answer]
    assert reward(EQUAL, *reversed(rewards) if turned else rewards) == 1.0


def test_who_speaks_last_waits_for_all_others_and_not_for_himself() -> None:
    policy = RewardPolicy({"*": 1.0}, expected=["feedback", "learned:*"], functions=["function:a"])
    assert not policy.have_others_answered([silent("feedback", "abstained")], "learned:thumbs")
    assert policy.have_others_answered([silent("feedback", "abstained"), scored("function:a", 1.0)], "learned:thumbs")
    assert not policy.have_others_answered([scored("learned:thumbs", 1.0)], "learned:thumbs")


def test_sources_without_a_weight_do_not_count() -> None:
    policy = RewardPolicy({"feedback": 1.0, "judge:*": 0.0})
    assert reward(policy, scored("feedback", 1.0), scored("judge:a", 0.0), scored("stranger", 0.0)) == 1.0
    assert reward(policy, scored("judge:a", 1.0)) is None


def test_a_required_source_must_have_scored() -> None:
    policy = RewardPolicy({"*": 1.0}, required=["feedback"])
    reward_of_branch = policy.branch_reward([scored("function:a", 1.0)], ["t"], rewarded=False)
    assert (reward_of_branch.reward, reward_of_branch.no_reward, reward_of_branch.parts) == (
        None,
        "required_source_missing",
        (),
    )
    assert policy.branch_reward([silent("feedback", "abstained")], ["t"], rewarded=False).no_reward == "no_reward"
    assert reward(policy, scored("function:a", 1.0), scored("feedback", 0.0)) == 0.5


def test_a_reward_that_goes_away_is_withdrawn() -> None:
    assert EQUAL.branch_reward([silent("a", "withdrawn")], ["t"], rewarded=True).no_reward == "withdrawn"
    assert EQUAL.branch_reward([silent("a", "withdrawn")], ["t"], rewarded=False).no_reward == "no_reward"


def test_verdicts_on_turns_count_for_the_branches_that_hold_them() -> None:
    rewards = [scored("f", 1.0, "a"), scored("f", 0.0, "b"), scored("f", 0.5, "c")]
    assert reward(EQUAL, *rewards, turns=("a", "b")) == 0.5
    assert reward(EQUAL, *rewards, turns=("c",)) == 0.5
    assert reward(EQUAL, *rewards, turns=("d",)) is None
    assert reward(EQUAL, *rewards, scored("f", 0.9), turns=("a",)) == 0.9, "its word on the whole comes first"


def test_waiting_ends_when_everybody_expected_has_spoken_and_somebody_scored() -> None:
    policy = RewardPolicy({"*": 1.0}, required=["feedback"], expected=["judge:*"], functions=["function:a"])
    answered = [silent("function:a", "abstained"), silent("judge:x", "timed_out")]
    assert not policy.is_complete(answered)
    assert not policy.is_complete([*answered, silent("feedback", "abstained")])
    assert policy.is_complete([*answered, scored("feedback", 1.0)])
    assert not policy.is_complete([answered[0], scored("feedback", 1.0)]), "the judge has said nothing"
    assert not EQUAL.is_complete([]), "nobody is expected, and nobody has scored"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), max_size=6), st.randoms(use_true_random=False))
def test_the_reward_lies_between_the_verdicts_whatever_their_order(
    values: list[tuple[str, float]], shuffle: random.Random
) -> None:
    rewards = [scored(source, value) for source, value in dict(values).items()]
    combined = reward(RewardPolicy({"a": 2.0, "*": 0.5}), *rewards)
    if rewards:
        assert combined is not None
        assert min(dict(values).values()) - 1e-9 <= combined <= max(dict(values).values()) + 1e-9
    shuffle.shuffle(rewards)
    assert reward(RewardPolicy({"a": 2.0, "*": 0.5}), *rewards) == combined


def test_a_reward_of_exactly_half_is_not_below_it() -> None:
    """Rounded weights add up to 0.49999999999999994, which `kto` and `rft` would treat as a bad answer."""
    policy = RewardPolicy({"user:tone": 0.5, "crowd": 2.0, "*": 1.0})
    rewards = [scored("crowd", 0.75), scored("feedback:truth", 0.25), scored("user", 0.5), scored("user:tone", 0.0)]
    assert reward(policy, *rewards) == 0.5


@given(st.floats(-1e6, 1e6), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9))
def test_sources_that_agree_give_exactly_their_value(value: float, weights: list[float]) -> None:
    policy = RewardPolicy({f"s{index}": weight for index, weight in enumerate(weights)})
    assert reward(policy, *(scored(f"s{index}", value) for index in range(len(weights)))) == value


def test_patterns_know_nothing_but_the_star() -> None:
    assert matches("judge:*", "judge:helpful")
    assert matches("*", "anything\nat all")
    assert not matches("judge:*", "my-judge:x")
    assert not matches("a.c", "abc")
    assert not matches("[ab]", "a")


@pytest.mark.parametrize("outcome", ["abstained", "failed", "parse_error", "timed_out", "withdrawn"])
def test_a_required_source_that_spoke_without_a_score_is_still_waited_for(outcome: Outcome) -> None:
    policy = RewardPolicy({"*": 1.0}, required=["feedback"])
    assert not policy.is_complete([scored("function:a", 1.0), silent("feedback", outcome)])
    assert policy.is_complete([scored("function:a", 1.0), scored("feedback", 0.0)])


def test_at_most_64_sources_count_required_ones_first_and_then_the_heaviest() -> None:
    names = [f"metric:{number:02}" for number in range(PARTS_MAX + 3)]
    weights = {name: 1.0 + number for number, name in enumerate(names)}
    policy = RewardPolicy({**weights, "unweighted": 0.0}, required=[names[0]])
    rewards = [scored(name, float(name == names[0])) for name in (*names, "unweighted")]

    exactly = policy.branch_reward(rewards[:PARTS_MAX], ["t"], rewarded=False)
    assert (len(exactly.parts), exactly.left_out) == (PARTS_MAX, ())

    more = policy.branch_reward(rewards, ["t"], rewarded=False)
    assert [part.source for part in more.parts] == [names[0], *names[4:]]
    assert more.left_out == tuple(names[1:4]), "sources without a weight are not named"
    counted = [weights[part.source] for part in more.parts]
    assert more.reward == pytest.approx(1.0 / sum(counted))
    assert Experience.model_fields["parts"].metadata[0].max_length == PARTS_MAX, "the bound of the event"
