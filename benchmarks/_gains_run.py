"""One training run of `benchmarks.signals`: users' feedback, the results of collector and scorer, and a real lineage.

HTTP, bus and databases are left out, as in `_learning_run`. Sessions are played on the real engine with the users of
the demo. The gateway's code turns their feedback into events, the collector's code makes trajectories, and the scorer
of a replay scores them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from openai import AsyncOpenAI

from benchmarks._engine_world import MAX_TOKENS, PLAYERS, CapturingClient
from benchmarks._gains_lines import Arm, Gain
from benchmarks._learning_run import SETTINGS, NewestVersion, World, trajectory_of
from benchmarks._thumbs_world import HINTS, JUDGE, judge_criteria, without_width_limit
from email_agent import agent
from email_agent import directions as directed
from email_agent.agent import AnsweredQuestion
from email_agent.build_base import LESSON
from email_agent.mailbox import Task, play
from headrace_gateway.access.keys import Caller
from headrace_gateway.requests.feedback import events_of
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.settings.sections import complete
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_schemas.programs import FeedbackLine
from headrace_schemas.values.base import utcnow
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.learned.models import Features
from headrace_scorer.learned.refitting import LearnedReplay, LearnedSource
from headrace_scorer.learned.thumbs import FittedThumbs
from headrace_scorer.replay import Rescoring
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

GiveFeedback = Callable[[AnsweredQuestion], Awaitable[None]]
_CALLER = Caller("", "", "default", frozenset(), None, LimitSettings())
_BODY_BYTES = 1 << 20
FEW, POISONERS = 0.03, 0.02


@dataclass(frozen=True, slots=True)
class Visit:
    """A finished session. `accepted` is the true result, which only the benchmark knows."""

    run: Trajectory
    feedback: Sequence[Feedback]
    accepted: bool

    @property
    def edits(self) -> int:
        return sum(event.feedback_kind == "edit" for event in self.feedback)


class Visitor(CapturingClient):
    """Client whose user also gives feedback."""

    feedback: list[Feedback]

    async def post(self, _path: str, *, body: object, cast_to: object) -> None:
        request = FeedbackRequest.model_validate_json(json.dumps(body))
        self.feedback = [
            *getattr(self, "said", ()),
            *events_of(request, _CALLER, SystemClock(), _BODY_BYTES),
        ]


class Traffic(World):
    """The world of `_learning_run` with users that give feedback."""

    def hold_back(self, kind: str) -> None:
        """Exclude questions of this kind from traffic."""
        self.training_tasks = (task for task in self.training_tasks if task.kind != kind)

    async def visits(
        self, version: str, sessions: int, give_feedback: GiveFeedback, draw: random.Random
    ) -> list[Visit]:
        """Play sessions and return them in the order in which they began. Each user has an independent random state."""

        slots = asyncio.Semaphore(PLAYERS)

        async def visit(task: Task) -> Visit:
            async with slots:
                user_draw = random.Random(draw.random())
                visitor = Visitor(self._completions, self._tokenizers[version], version, self.model)
                client = cast(AsyncOpenAI, visitor)
                episode = await play(client, version, self.tools, task.question, MAX_TOKENS)
                accepted = self.is_right(task, episode)
                await give_feedback(AnsweredQuestion(client, version, self.tools, task, episode, accepted, user_draw))
                return Visit(trajectory_of(visitor.turns, visitor.feedback), visitor.feedback, accepted)

        return list(await asyncio.gather(*map(visit, itertools.islice(self.training_tasks, sessions))))


class _Overheard(LearnedReplay):
    """Reward model that records its estimates of all runs."""

    def __init__(self, source: LearnedSource) -> None:
        super().__init__(source)
        self.estimates: dict[str, float] = {}
        self._bold: dict[str, FittedThumbs] = {}

    async def fit(self) -> None:
        await super().fit()
        self._bold = {
            tenant: without_width_limit(model)
            for tenant, model in self._fitted.items()
            if isinstance(model, FittedThumbs)
        }

    def reward(self, trajectory: Trajectory, features: Features) -> dict[EntryKey, SourceReward]:
        fitted = self._bold.get(trajectory.tenant)
        likely = None if fitted is None else fitted.judge(features)
        if likely is not None:
            self.estimates[trajectory.trajectory_id] = likely.value
        return super().reward(trajectory, features)


class Scoring:
    """The scorer of a stream, which scores one batch of runs after the other. A reward model uses the thumbs of all
    earlier runs."""

    def __init__(self, settings: ScorerSettings, pool: FunctionPool, judge: np.random.Generator | None) -> None:
        self._settings, self._pool, self._judge = settings, pool, judge
        self._learning: _Overheard | None = None
        if settings.learned.model is not None:
            self._learning = _Overheard(LearnedSource(settings.learned, lambda: pool.functions))

    @property
    def estimates(self) -> Mapping[str, float]:
        """Estimates of the reward model by trajectory, including runs for which it abstains."""
        return {} if self._learning is None else self._learning.estimates

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: ScorerSettings, judge: np.random.Generator | None) -> AsyncIterator[Scoring]:
        """Open a scorer. With `judge`, a judge that is often wrong also scores each run."""
        pool = FunctionPool(settings)
        await pool.reload()
        try:
            yield cls(settings, pool, judge)
        finally:
            await pool.close()

    async def experiences(self, visits: Sequence[Visit]) -> list[Experience]:
        """Return the experiences of the runs, in their order."""
        rescoring = Rescoring(self._settings, self._pool, self._learning)
        events = [event.model_dump(mode="json") for visit in visits for event in visit.feedback]
        for number, event in enumerate(events):
            rescoring.add_line("feedback", FeedbackLine(event=event, place=number).model_dump_json().encode())
        for reward in self._judge_rewards(visits):
            rescoring.add_line("reward", reward.to_json())
        result: list[Experience] = []
        for visit in visits:
            result += rescoring.accept(await rescoring.score(visit.run.to_json()))
        return [*result, *[experience async for experience in rescoring.learned_experiences()]]

    def _judge_rewards(self, visits: Sequence[Visit]) -> Iterator[Reward]:
        for visit in visits:
            criteria = None if self._judge is None else judge_criteria(self._judge, good=visit.accepted)
            if criteria is not None:
                yield Reward(
                    time=utcnow(),
                    trajectory_id=visit.run.trajectory_id,
                    session_key=visit.run.session_key,
                    source=JUDGE,
                    outcome="scored",
                    value=sum(criteria.values()) / len(criteria),
                    criteria=criteria,
                )


async def few_thumbs(played: agent.AnsweredQuestion, poisoners: float = 0.0) -> None:
    """Type corrections or thanks at the rates of `HINTS`, and rarely give a thumb."""
    rates = {name: up if played.accepted else down for name, (up, down, _) in HINTS.items()}
    if played.draw.random() < rates["corrected"]:
        await agent.reply(played, agent.WRONG)
    elif played.draw.random() < rates["thanked"]:
        await agent.reply(played, agent.THANKS)
    await agent.thumbs(played, share=FEW, poisoners=poisoners)


async def directions(played: agent.AnsweredQuestion) -> None:
    """Type which tool to call, as an informed user, or thank the agent."""
    await _reply_and_end(played, directed.direction(played.task, played.tools, played.episode.messages, played.draw)[0])


async def only_say_wrong(played: agent.AnsweredQuestion) -> None:
    """Type the same useless message in every session."""
    await _reply_and_end(played, agent.WRONG)


class Misled:
    """Planted fault: users type the message that belongs to the previous session."""

    def __init__(self) -> None:
        self._before: str | None = None

    async def __call__(self, played: agent.AnsweredQuestion) -> None:
        message, _ = directed.direction(played.task, played.tools, played.episode.messages, played.draw)
        text, self._before = self._before or message, message
        await _reply_and_end(played, text)


async def _reply_and_end(played: agent.AnsweredQuestion, text: str) -> None:
    await agent.reply(played, agent.THANKS if played.accepted else text, MAX_TOKENS)
    await played.end()


LESSONS = {"demo": LESSON, "directed": directed.DIRECTED_LESSON}
USERS: Mapping[str, GiveFeedback] = {
    **agent.SIGNALS,
    "directions": directions,
    "directions of others": Misled(),
    "nothing but no": only_say_wrong,
    "few thumbs": few_thumbs,
    "few thumbs, poisoned": partial(few_thumbs, poisoners=POISONERS),
}


def run(arm: Arm, seed: int, base: Path, plays: int) -> Gain:
    """Run one arm in a process of its own, with one torch thread. `plays` is the number of audit tasks of each
    score."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-gains-") as scratch:
        return asyncio.run(_run(arm, seed, base, plays, Path(scratch)))


def settings_of(arm: Arm, seed: int, base: Path) -> TrainerSettings:
    """Return the demo's settings with a version for each round."""
    optimizer = {**SETTINGS["trainer"]["optimizer"], **_section(arm, "optimizer")}
    changed = {"base": str(base), "seed": seed, "steps_per_version": 1, **arm.trainer, "optimizer": optimizer}
    return complete(TrainerSettings).model_validate({**SETTINGS["trainer"], **changed})


def _section(arm: Arm, name: str) -> Mapping[str, object]:
    section = arm.trainer.get(name, {})
    assert isinstance(section, Mapping)
    return section


async def _run(arm: Arm, seed: int, base: Path, plays: int, scratch: Path) -> Gain:
    began = time.perf_counter()
    blobs = BlobStore((scratch / "blobs").as_uri())
    lineage = open_lineage(settings_of(arm, seed, base), blobs, SystemClock())
    result = Gain(arm.name, seed, [])
    scorer = ScorerSettings.model_validate({"required": [], **arm.scorer})
    judge = np.random.default_rng([seed, 3]) if arm.judged else None
    async with Traffic.open(seed, blobs, scratch / "versions") as world, Scoring.open(scorer, judge) as scoring:
        if arm.held_back is not None:
            world.hold_back(arm.held_back)
        training = _Training(arm, seed, lineage, world, scoring, result)
        if arm.before:
            await training.play_sessions(arm.before)
        for number in range(1, arm.rounds + 1):
            if not await training.round(last=number == arm.rounds):
                break
            if arm.traced and number % arm.traced == 0:
                result.trace.append((result.sessions, await world.score(await training.version(), plays)))
        is_scored = arm.times == 1 and result.trace and result.trace[-1][0] == result.sessions
        last = await training.version()
        result.scores = result.trace[-1][1] if is_scored else await world.score(last, arm.times * plays)
    result.steps = lineage.state.steps
    result.health = lineage.health.stopped.reason if lineage.health.stopped else None
    result.seconds = round(time.perf_counter() - began, 1)
    return result


MEASURED = ("hindsight_gap", "hindsight_gap_chance", "hindsight_runs", "guard_drop_mean", "guard_drop")
"""Names of the step metrics that are stored."""


class _Training:
    def __init__(self, arm: Arm, seed: int, lineage: Lineage, world: Traffic, scoring: Scoring, result: Gain) -> None:
        self._lineage, self.version = lineage, NewestVersion(lineage, world)
        self._arm, self._scoring, self._result = arm, scoring, result
        self._traffic = world
        self._draw = random.Random(f"users {seed}")
        self._next_offset = 0

    async def play_sessions(self, sessions: int) -> list[Experience]:
        """Play sessions with the newest version and return the experiences that the scorer makes of them."""
        version = await self.version()
        visits = await self._traffic.visits(version, sessions, USERS[self._arm.users], self._draw)
        experiences = await self._scoring.experiences(visits)
        self._result.accepted.append(statistics.fmean(visit.accepted for visit in visits))
        self._result.judged += _learned_rewards(visits, experiences)
        estimates = self._scoring.estimates
        self._result.ordered += [
            (visit.accepted, estimates[name]) for visit in visits if (name := visit.run.trajectory_id) in estimates
        ]
        self._result.edits += sum(visit.edits for visit in visits)
        return experiences

    async def round(self, *, last: bool) -> bool:
        """Play sessions, take the training steps that they allow, and publish a version. Return False when training is
        over."""
        lineage, stop = self._lineage, threading.Event()
        for experience in await self.play_sessions(self._arm.sessions):
            lineage.state.admit(experience, (0, self._next_offset), experience.time)
            self._next_offset += 1
        self._result.sessions += self._arm.sessions
        enough = self._arm.edits_max is not None and self._result.edits >= self._arm.edits_max
        while items := lineage.next_batch(at_end=last or enough):
            metrics = await asyncio.to_thread(lineage.step, items, stop)
            self._result.measured.append({name: metrics[name] for name in MEASURED if name in metrics})
            if lineage.health.stopped is not None:
                await asyncio.to_thread(lineage.revert_to_last_version)
                break
        await asyncio.to_thread(lambda: lineage.save(publish=lineage.has_unpublished_steps))
        return lineage.health.stopped is None and not enough


def _learned_rewards(visits: Sequence[Visit], experiences: Sequence[Experience]) -> list[tuple[bool, float]]:
    """Return for each run with a learned reward whether it was accepted, and that reward."""
    accepted = {visit.run.trajectory_id: visit.accepted for visit in visits}
    return [
        (accepted[experience.trajectory_id], part.value)
        for experience in experiences
        for part in experience.parts
        if part.source.startswith("learned:")
    ]
