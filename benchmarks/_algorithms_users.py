"""Users of the e-mail agent, one function for each signal, and the experiences that result from their feedback.

The users are those of the demo (`email_agent.agent`). The code of collector and scorer makes the experiences as in the
services: feedback becomes entries, reward functions are called, and the policy combines all rewards. The `shuffle_*`
functions corrupt signals for control runs: they attach the same feedback to other answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, cast

from openai import AsyncOpenAI

from benchmarks._corrections import correction
from benchmarks._engine_world import MAX_TOKENS, PlayedRun
from benchmarks._learning_run import POLICY, SETTINGS, World, function_rewards, scored_experiences, trajectory_of
from email_agent import agent
from email_agent.mailbox import Task
from headrace.rewards.natural_signals import signals
from headrace_schemas import Branch, Experience, Feedback, Trajectory
from headrace_schemas.events.trajectory import Edit, PreferenceSide, TurnReward
from headrace_schemas.values.base import utcnow
from headrace_scorer.feedback_entries import entries_of, source_reward
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.store import branch_answers


def shuffle_edits(experiences: Sequence[Experience], chance: Random) -> list[Experience]:
    """Give each edit the text of another run's edit."""
    messages = [edit.message for experience in experiences for edit in experience.edits]
    dealt = iter(chance.sample(messages, len(messages)))

    def corrupt(edit: Edit) -> Edit:
        return edit.model_copy(update={"message": next(dealt)})

    return [
        experience.model_copy(update={"edits": tuple(map(corrupt, experience.edits))}) for experience in experiences
    ]


def shuffle_preference_sides(experiences: Sequence[Experience], chance: Random) -> list[Experience]:
    """Assign the preferred side of each comparison at random."""
    names = sorted({side.preference_id for experience in experiences for side in experience.preferences})
    turned = {name for name in names if chance.random() < 0.5}
    other = {"chosen": "rejected", "rejected": "chosen"}

    def corrupt(side: PreferenceSide) -> PreferenceSide:
        return side.model_copy(update={"side": other[side.side]}) if side.preference_id in turned else side

    return [
        experience.model_copy(update={"preferences": tuple(map(corrupt, experience.preferences))})
        for experience in experiences
    ]


def shuffle_turn_rewards(experiences: Sequence[Experience], chance: Random) -> list[Experience]:
    """Shuffle the rewards of turns and leave the rewards of runs unchanged."""
    values = [turn.value for experience in experiences for turn in experience.turn_rewards]
    dealt = iter(chance.sample(values, len(values)))

    def corrupt(turn: TurnReward) -> TurnReward:
        return turn.model_copy(update={"value": next(dealt)})

    return [
        experience.model_copy(update={"turn_rewards": tuple(map(corrupt, experience.turn_rewards))})
        for experience in experiences
    ]


def shuffle_replies(experiences: Sequence[Experience], answered: Collection[str], chance: Random) -> list[Experience]:
    """Replace the user's reply between an answer and the next one by the reply of another run.

    The model's next answer stays.

    Args:
        answered: turns that a user replied to.
    """
    indices = [_answered_span(experience.branch, answered) for experience in experiences]
    replies = [
        experience.branch.token_ids[experience.branch.spans[index].stop : experience.branch.spans[index + 1].start]
        for experience, index in zip(experiences, indices, strict=True)
        if experience.branch is not None and index is not None
    ]
    dealt = iter(chance.sample(replies, len(replies)))
    return [
        experience if experience.branch is None or index is None else experience.model_copy(
            update={"branch": _with_reply(experience.branch, index, next(dealt))}
        )
        for experience, index in zip(experiences, indices, strict=True)
    ]  # fmt: skip


def _answered_span(branch: Branch | None, answered: Collection[str]) -> int | None:
    """Return the index of the span that a user replied to and after which the model continued, or None."""
    spans = () if branch is None else branch.spans
    return next((index for index, (span, _) in enumerate(pairwise(spans)) if span.turn_id in answered), None)


def _with_reply(branch: Branch, index: int, reply: Sequence[int]) -> Branch:
    """Return the branch with another reply after the span `index`."""
    before, after = branch.spans[index].stop, branch.spans[index + 1].start
    longer = len(reply) - (after - before)
    spans = [
        span if number <= index else span.model_copy(update={"start": span.start + longer})
        for number, span in enumerate(branch.spans)
    ]
    ids = (*branch.token_ids[:before], *reply, *branch.token_ids[after:])
    return branch.model_copy(update={"token_ids": ids, "spans": tuple(spans)})


GROUP, COMPARED = 8, 4
"""Number of runs of one question that form a group, and number of runs of which the best is compared with the worst."""
_CORRECTIONS_MAX = 64
ALONE = RewardPolicy({"*": 1.0})
"""Reward policy that uses the feedback of people alone."""
UNREWARDED = RewardPolicy({"*": 1.0}, unrewarded_branches=True)
"""Reward policy without rewards, because training with a teacher needs the tokens alone."""
WITH_TURNS = RewardPolicy({**SETTINGS["scorer"]["weights"], "feedback": 1e-6}, SETTINGS["scorer"]["required"])
"""The demo's reward policy for runs. Feedback on single turns rewards those turns, with almost no weight for the
run."""
GiveFeedback = Callable[["RunWithUser"], Awaitable[None]]
Functions = Callable[[Trajectory], Iterable[SourceReward]]
Signal = Callable[[World, str, int, Random], Awaitable[list[Experience]]]
"""Function that plays episodes with a version and returns the resulting experiences."""


@dataclass(frozen=True)
class RunWithUser(agent.AnsweredQuestion):
    """A played run whose user records feedback instead of sending it."""

    run: PlayedRun[Task]
    group: str
    """Group within which the run is compared."""
    feedback_events: list[Feedback] = field(default_factory=list)

    async def send(self, **fields: Any) -> None:
        self.feedback_events.append(feedback(self.run, **fields))

    async def end(self, **fields: Any) -> None:
        ids = self.episode.response_ids
        await self.send(msg_ids=ids, ends_session=True, task_id=self.group, **fields)


def feedback(run: PlayedRun[Any], **fields: Any) -> Feedback:
    """Return a feedback event as the gateway creates it."""
    named = {"time": utcnow(), "feedback_id": uuid.uuid4().hex, "session_key": run.turns[0].session_key}
    return Feedback.model_validate_json(json.dumps({**named, **fields}, default=str))


def experiences(
    run: PlayedRun[Any], feedback_events: Sequence[Feedback], functions: Functions, policy: RewardPolicy
) -> list[Experience]:
    """Return the experiences that collector and scorer make of a run and its feedback."""
    closed = trajectory_of(run.turns, feedback_events)
    entries = entries_of(FeedbackSet(tuple(feedback_events)), branch_answers(closed), {}, _CORRECTIONS_MAX)
    rewards = [source_reward(key, entry.outcome, entry.value) for key, entry in entries.items() if key.kind == "reward"]
    details = {
        key: entry.detail for key, entry in entries.items() if entry.outcome == "given" and entry.detail is not None
    }
    return scored_experiences(closed, [*rewards, *functions(closed)], details, policy)


def no_functions(_run: Trajectory) -> Iterable[SourceReward]:
    """Return no rewards, in place of reward functions."""
    return ()


def next_messages(run: Trajectory) -> Iterable[SourceReward]:
    """Yield the rewards that the reward function `signals` derives from users' next messages."""
    for turn_id, value in signals(run, run.context).turns.items():
        yield SourceReward("function:signals", turn_id, "scored", value)


async def _collect_feedback(
    world: World, run: PlayedRun[Task], give_feedback: GiveFeedback, group: str, draw: Random
) -> list[Feedback]:
    client = cast(AsyncOpenAI, run.client)
    accepted = world.is_right(run.task, run.episode)
    version = run.client.version
    run_with_user = RunWithUser(client, version, world.tools, run.task, run.episode, accepted, draw, run, group)
    await give_feedback(run_with_user)
    return run_with_user.feedback_events


def _repeated_tasks(world: World, episodes: int, times: int) -> list[Task]:
    """Return tasks of the training traffic, each `times` times."""
    tasks = list(itertools.islice(world.training_tasks, episodes // times))
    return [task for task in tasks for _ in range(times)]


def _signal(give_feedback: GiveFeedback, functions: Functions, policy: RewardPolicy, *, times: int = 1) -> Signal:
    """Return a signal whose users give feedback on single runs. Repeated tasks form a group."""

    async def collect(world: World, version: str, episodes: int, draw: Random) -> list[Experience]:
        runs = await world.play_all(version, _repeated_tasks(world, episodes, times))
        return await _experiences_after_feedback(world, runs, give_feedback, functions, policy, draw, grouped=times > 1)

    return collect


async def _experiences_after_feedback(
    world: World,
    runs: Sequence[PlayedRun[Task]],
    give_feedback: GiveFeedback,
    functions: Functions,
    policy: RewardPolicy,
    draw: Random | None = None,
    *,
    grouped: bool = False,
) -> list[Experience]:
    """Return the experiences of runs after their users gave feedback."""
    feedback_by_run = await asyncio.gather(
        *(
            _collect_feedback(world, run, give_feedback, run.task.id if grouped else run.task.kind, draw or Random(0))
            for run in runs
        )
    )
    return [
        experience
        for run, events in zip(runs, feedback_by_run, strict=True)
        for experience in experiences(run, events, functions, policy)
    ]


async def _edits_and_rewards(run: agent.AnsweredQuestion) -> None:
    await agent.edits(run)
    await agent.rewards(run)


async def _turns(run: RunWithUser) -> None:
    """Give feedback on each step of the agent: 1 for right steps, and 0 for the first wrong step."""
    await agent.edits(run)
    wrong = [event.msg_ids[0] for event in run.feedback_events if event.edit is not None]
    run.feedback_events.clear()
    ids = run.episode.response_ids
    for turn_id in ids[: ids.index(wrong[0])] if wrong else ids:
        await run.send(msg_ids=[turn_id], level="turn", value=1.0)
    for turn_id in wrong:
        await run.send(msg_ids=[turn_id], level="turn", value=0.0)
    await agent.rewards(run)


async def _end_without_feedback(run: agent.AnsweredQuestion) -> None:
    await run.end()


def _correction_signal(*, dealt: bool = False, spliced: bool = False) -> Signal:
    """Return a signal of next messages that correct the agent or thank it.

    Args:
        dealt: show each run the message that belongs to another run; the model continues after that message.
        spliced: let the model continue after its own message, then replace the message by that of another run.
    """

    async def collect(world: World, version: str, episodes: int, draw: Random) -> list[Experience]:
        runs = await world.play_all(version, _repeated_tasks(world, episodes, 1))
        texts = [_next_message(world, run) for run in runs]
        shown_texts = draw.sample(texts, len(texts)) if dealt else texts
        text_of = {id(run.episode): text for run, text in zip(runs, shown_texts, strict=True)}

        async def reply(run: RunWithUser) -> None:
            await agent.reply(run, text_of[id(run.episode)], MAX_TOKENS)
            await run.end()

        answered = [run.turns[-1].turn_id for run in runs]
        experiences = await _experiences_after_feedback(world, runs, reply, next_messages, ALONE)
        return shuffle_replies(experiences, answered, draw) if spliced else experiences

    return collect


def _next_message(world: World, run: PlayedRun[Task]) -> str:
    if world.is_right(run.task, run.episode):
        return agent.THANKS
    return correction(run.task.kind, run.task.expected, run.episode.messages)


async def pairs(world: World, version: str, episodes: int, _draw: Random) -> list[Experience]:
    """Return preferences between runs of one question.

    In each group, the preferred answer is the best run's first step that the worst run did not take.
    """
    runs = await world.play_all(version, _repeated_tasks(world, episodes, COMPARED))
    experiences_of_pairs: list[Experience] = []
    for first in range(0, len(runs), COMPARED):
        experiences_of_pairs += _compare_best_with_worst(runs[first : first + COMPARED])
    return experiences_of_pairs


def _compare_best_with_worst(runs: Sequence[PlayedRun[Task]]) -> list[Experience]:
    """Return the experiences of the best and the worst of several runs, with a preference between their first different
    answers."""

    def worth(run: PlayedRun[Task]) -> float:
        context = {"expected": run.task.expected}
        closed = trajectory_of(run.turns, [feedback(run, msg_ids=[run.turns[0].turn_id], context=context)])
        total = POLICY.branch_reward([*function_rewards(closed)], closed.turn_ids, rewarded=False).reward
        assert total is not None
        return total

    ordered = sorted(runs, key=worth)
    worst, best = ordered[0], ordered[-1]
    fork = _first_difference(best, worst)
    if worth(best) - worth(worst) < 0.01 or fork is None:
        return []
    sides = [{"turn_id": run.turns[fork].turn_id, "choice": 0} for run in (best, worst)]
    preference = dict(zip(("chosen", "rejected"), sides, strict=True))
    result = []
    for run in (best, worst):
        feedback_events = [feedback(run, msg_ids=[run.turns[fork].turn_id], preference=preference)]
        result += experiences(run, feedback_events, no_functions, ALONE)
    return result


def _first_difference(run: PlayedRun[Task], other_run: PlayedRun[Task]) -> int | None:
    """Return the index of the first turn with equal prompts and different answers, or None."""
    for index, (turn, other_turn) in enumerate(zip(run.turns, other_run.turns, strict=False)):
        if turn.choices[0].token_ids != other_turn.choices[0].token_ids:
            return index if turn.prompt_token_ids == other_turn.prompt_token_ids else None
    return None


SIGNALS: Mapping[str, Signal] = {
    "rewards": _signal(agent.rewards, function_rewards, POLICY),
    "groups": _signal(agent.rewards, function_rewards, POLICY, times=GROUP),
    "turns": _signal(_turns, function_rewards, WITH_TURNS, times=GROUP),
    "labels": _signal(agent.rewards, no_functions, ALONE),
    "edits": _signal(agent.edits, no_functions, ALONE),
    "edits and rewards": _signal(_edits_and_rewards, function_rewards, POLICY),
    "pairs": pairs,
    "corrections": _correction_signal(),
    "corrections of others": _correction_signal(spliced=True),
    "corrections of others, followed": _correction_signal(dealt=True),
    "nothing": _signal(_end_without_feedback, no_functions, UNREWARDED),
}
