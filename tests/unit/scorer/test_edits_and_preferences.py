"""Edits, preferences and rewards of single answers: into the experience, revised with it, and out of it again."""

from __future__ import annotations

from typing import Any

import httpx

from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common
from headrace_schemas import Experience, Feedback, Message, Reward, RewardResult
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_schemas.values import ids
from headrace_scorer import api
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.settings import ScorerSettings
from tests.feedback.sayings import Scene
from tests.feedback.world import trajectory
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
    """The last revision of each branch."""
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


async def rematched(rig: Rig) -> None:
    """Far fewer than one step takes."""
    await rig.stream.step(rematch_of(rig))


async def test_feedback_about_a_task_is_about_its_runs_of_before_and_after(open_scorer: Open) -> None:
    def of_task(value: float | None, partition: int = 0, **fields: Any) -> Feedback:
        return feedback("any", value=value, level="task", task_id="task", partition=partition, **fields)

    runs = [trajectory(Scene(name, "task", {ids.response_id(ids.session_key("default", name)): 1})) for name in "xyz"]
    async with open_scorer() as rig:
        await rig.deliver(runs[0])
        await rig.deliver(of_task(0.5), feedback("other", value=0.0, level="task", task_id="other", partition=0))
        await rematched(rig)
        await rig.stream.deliver(of_task(1.0, partition=1), partition=1)
        await rig.deliver(runs[1], feedback("y", value=1.0))
        await rematched(rig)
        rewards = {experience.session_id: experience.reward for experience in rig.stream.sent(Experience)}
        assert rewards == {"x": 0.5, "y": 1.0}, "what is said of a session goes before what is said of its task"
        await rig.deliver(runs[2], of_task(None, withdrawn=True))
        await rematched(rig)
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
