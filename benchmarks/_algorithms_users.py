"""What users of the e-mail agent say of its answers, one function for each signal, and the experiences of it.

The demo's own users say it (`email_agent.users`), and collector and scorer make experiences of it as in the services:
feedback becomes entries, reward functions are called, and the policy makes one reward of all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from openai import AsyncOpenAI

from benchmarks._algorithms_spoiled import replies_of_others
from benchmarks._corrections import correction
from benchmarks._engine_world import MAX_TOKENS, PlayedRun
from benchmarks._learning_world import POLICY, SETTINGS, World, rewarded, scored_experiences, trajectory_of
from email_agent import users
from email_agent.tasks import Task
from headrace.rewards.natural_signals import signals
from headrace_schemas import Experience, Feedback, Trajectory
from headrace_schemas.base import utcnow
from headrace_scorer.answer_remarks import source_reward
from headrace_scorer.feedback_entries import entries_of
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.store import branch_answers

GROUP, COMPARED = 8, 4
"""Plays of one question that are rewarded together, and of which the best is compared with the worst."""
_CORRECTIONS_MAX = 64
ALONE = RewardPolicy({"*": 1.0})
"""What people say is the reward, and nothing else is."""
UNREWARDED = RewardPolicy({"*": 1.0}, unrewarded_branches=True)
"""Nobody says anything, and a teacher needs no more than the tokens."""
WITH_TURNS = RewardPolicy({**SETTINGS["scorer"]["weights"], "feedback": 1e-6}, SETTINGS["scorer"]["required"])
"""The demo's rewards for the run. What is said of single turns counts for them, and for the run next to nothing."""
Said = Callable[["Heard"], Awaitable[None]]
Functions = Callable[[Trajectory], Iterable[SourceReward]]
Signal = Callable[[World, str, int, Random], Awaitable[list[Experience]]]
"""Of a version: so many episodes, and what they come to."""


@dataclass(frozen=True)
class Heard(users.Played):
    """What is said, in place of being sent."""

    run: PlayedRun[Task]
    group: str
    """What its run is compared within."""
    told: list[Feedback] = field(default_factory=list)

    async def send(self, **said: Any) -> None:
        self.told.append(feedback(self.run, **said))

    async def end(self, **said: Any) -> None:
        ids = self.episode.response_ids
        await self.send(msg_ids=ids, ends_session=True, task_id=self.group, **said)


def feedback(run: PlayedRun[Any], **said: Any) -> Feedback:
    """As the gateway takes it."""
    named = {"time": utcnow(), "feedback_id": uuid.uuid4().hex, "session_key": run.turns[0].session_key}
    return Feedback.model_validate_json(json.dumps({**named, **said}, default=str))


def experiences(
    run: PlayedRun[Any], told: Sequence[Feedback], functions: Functions, policy: RewardPolicy
) -> list[Experience]:
    """As collector and scorer make them of a run and what was said of it."""
    closed = trajectory_of(run.turns, told)
    entries = entries_of(FeedbackSet(tuple(told)), branch_answers(closed), {}, _CORRECTIONS_MAX)
    rewards = [source_reward(key, one.outcome, one.value) for key, one in entries.items() if key.kind == "reward"]
    given = {key: one.detail for key, one in entries.items() if one.outcome == "given" and one.detail is not None}
    return scored_experiences(closed, [*rewards, *functions(closed)], given, policy)


def nobody(_run: Trajectory) -> Iterable[SourceReward]:
    """No reward function."""
    return ()


def next_messages(run: Trajectory) -> Iterable[SourceReward]:
    """What the reward function `signals` reads in what users typed next."""
    for turn_id, value in signals(run, run.context).turns.items():
        yield SourceReward("function:signals", turn_id, "scored", value)


async def _heard(world: World, run: PlayedRun[Task], said: Said, group: str, draw: Random) -> list[Feedback]:
    client = cast(AsyncOpenAI, run.client)
    accepted = world.right(run.task, run.episode)
    version = run.client.version
    heard = Heard(client, version, world.tools, run.task, run.episode, accepted, draw, run, group)
    await said(heard)
    return heard.told


def _asked(world: World, episodes: int, times: int) -> list[Task]:
    """Each question so many times."""
    tasks = list(itertools.islice(world.asked, episodes // times))
    return [task for task in tasks for _ in range(times)]


def _of(said: Said, functions: Functions, policy: RewardPolicy, *, times: int = 1) -> Signal:
    """A signal in which users speak of one run at a time. What is asked several times is a group of its own."""

    async def collect(world: World, version: str, episodes: int, draw: Random) -> list[Experience]:
        runs = await world.played(version, _asked(world, episodes, times))
        return await _spoken(world, runs, said, functions, policy, draw, grouped=times > 1)

    return collect


async def _spoken(
    world: World,
    runs: Sequence[PlayedRun[Task]],
    said: Said,
    functions: Functions,
    policy: RewardPolicy,
    draw: Random | None = None,
    *,
    grouped: bool = False,
) -> list[Experience]:
    """What comes of runs once their users have spoken."""
    told = await asyncio.gather(
        *(_heard(world, run, said, run.task.id if grouped else run.task.kind, draw or Random(0)) for run in runs)
    )
    return [made for run, some in zip(runs, told, strict=True) for made in experiences(run, some, functions, policy)]


async def _edits_and_rewards(heard: users.Played) -> None:
    await users.edits(heard)
    await users.rewards(heard)


async def _turns(heard: Heard) -> None:
    """Who knows the way says of each step whether it was right, up to the first one that was not."""
    await users.edits(heard)
    wrong = [one.msg_ids[0] for one in heard.told if one.edit is not None]
    heard.told.clear()
    ids = heard.episode.response_ids
    for turn_id in ids[: ids.index(wrong[0])] if wrong else ids:
        await heard.send(msg_ids=[turn_id], level="turn", value=1.0)
    for turn_id in wrong:
        await heard.send(msg_ids=[turn_id], level="turn", value=0.0)
    await users.rewards(heard)


async def _say_nothing(heard: users.Played) -> None:
    await heard.end()


def _corrections(*, dealt: bool = False, spliced: bool = False) -> Signal:
    """Next messages that say what to do instead, or thank. `dealt`: those of other runs, which the model then follows;
    `spliced`: those of other runs in place of the ones that it has followed."""

    async def collect(world: World, version: str, episodes: int, draw: Random) -> list[Experience]:
        runs = await world.played(version, _asked(world, episodes, 1))
        texts = [_next_message(world, run) for run in runs]
        given = draw.sample(texts, len(texts)) if dealt else texts
        text_of = {id(run.episode): text for run, text in zip(runs, given, strict=True)}

        async def reply(heard: Heard) -> None:
            await users.reply(heard, text_of[id(heard.episode)], MAX_TOKENS)
            await heard.end()

        answered = [run.turns[-1].turn_id for run in runs]
        made = await _spoken(world, runs, reply, next_messages, ALONE)
        return replies_of_others(made, answered, draw) if spliced else made

    return collect


def _next_message(world: World, run: PlayedRun[Task]) -> str:
    if world.right(run.task, run.episode):
        return users.THANKS
    return correction(run.task.kind, run.task.expected, run.episode.messages)


async def pairs(world: World, version: str, episodes: int, _draw: Random) -> list[Experience]:
    """Of several runs of a question somebody prefers the best one's first step that the worst one did not take."""
    runs = await world.played(version, _asked(world, episodes, COMPARED))
    made: list[Experience] = []
    for first in range(0, len(runs), COMPARED):
        made += _compared(runs[first : first + COMPARED])
    return made


def _compared(runs: Sequence[PlayedRun[Task]]) -> list[Experience]:
    def worth(run: PlayedRun[Task]) -> float:
        context = {"expected": run.task.expected}
        closed = trajectory_of(run.turns, [feedback(run, msg_ids=[run.turns[0].turn_id], context=context)])
        total = POLICY.branch_reward([*rewarded(closed)], closed.turn_ids, rewarded=False).reward
        assert total is not None
        return total

    ordered = sorted(runs, key=worth)
    worst, best = ordered[0], ordered[-1]
    apart = _apart(best, worst)
    if worth(best) - worth(worst) < 0.01 or apart is None:
        return []
    sides = [{"turn_id": run.turns[apart].turn_id, "choice": 0} for run in (best, worst)]
    preference = dict(zip(("chosen", "rejected"), sides, strict=True))
    found = []
    for run in (best, worst):
        told = [feedback(run, msg_ids=[run.turns[apart].turn_id], preference=preference)]
        found += experiences(run, told, nobody, ALONE)
    return found


def _apart(one: PlayedRun[Task], other: PlayedRun[Task]) -> int | None:
    """The first turn that was asked alike and answered otherwise."""
    for place, (ours, theirs) in enumerate(zip(one.turns, other.turns, strict=False)):
        if ours.choices[0].token_ids != theirs.choices[0].token_ids:
            return place if ours.prompt_token_ids == theirs.prompt_token_ids else None
    return None


SIGNALS: Mapping[str, Signal] = {
    "rewards": _of(users.rewards, rewarded, POLICY),
    "groups": _of(users.rewards, rewarded, POLICY, times=GROUP),
    "turns": _of(_turns, rewarded, WITH_TURNS, times=GROUP),
    "labels": _of(users.rewards, nobody, ALONE),
    "edits": _of(users.edits, nobody, ALONE),
    "edits and rewards": _of(_edits_and_rewards, rewarded, POLICY),
    "pairs": pairs,
    "corrections": _corrections(),
    "corrections of others": _corrections(spliced=True),
    "corrections of others, followed": _corrections(dealt=True),
    "nothing": _of(_say_nothing, nobody, UNREWARDED),
}
