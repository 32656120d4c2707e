"""The e-mail agent's training traffic with users that give feedback, and the collector's and scorer's results.

HTTP, bus and databases are left out, as in `_learning_run`. Sessions are played on the real engine with the users of
the demo. The gateway's code turns their feedback into events, the collector's code makes trajectories, and the scorer
of a replay scores them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
from openai import AsyncOpenAI

from benchmarks._engine_world import MAX_TOKENS, PLAYERS, CapturingClient
from benchmarks._learning_run import World, trajectory_of
from benchmarks._thumbs_world import JUDGE, judge_criteria, without_width_limit
from email_agent.tasks import Task
from email_agent.tools import play
from email_agent.users import AnsweredQuestion
from headrace_gateway.access.keys import Caller
from headrace_gateway.requests.feedback import events_of
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.clock import SystemClock
from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_schemas.programs.replay import FeedbackLine
from headrace_schemas.values.base import utcnow
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.learned.models import Features
from headrace_scorer.learned.refitting import LearnedReplay
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.learned.thumbs import FittedThumbs
from headrace_scorer.replay import Rescoring
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.settings import ScorerSettings

GiveFeedback = Callable[[AnsweredQuestion], Awaitable[None]]
_CALLER = Caller("", "", "default", frozenset(), None, LimitSettings())
_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Visit:
    """A finished session. `accepted` is the true result, which only the benchmark knows."""

    run: Trajectory
    feedback: Sequence[Feedback]
    accepted: bool

    @property
    def edits(self) -> int:
        return sum(event.about == "edit" for event in self.feedback)


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
        return [*result, *[experience async for experience in rescoring.learned()]]

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
