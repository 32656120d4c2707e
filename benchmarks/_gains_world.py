"""The e-mail agent's own traffic with users who say something, and what collector and scorer make of it.

As `_learning_world`, without HTTP, bus and databases: sessions are played on the real engine, users are those of the
demo, their words become events as in the gateway and a trajectory as in the collector. A replay's scorer scores them.
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
from benchmarks._learning_world import World, trajectory_of
from benchmarks._thumbs_world import JUDGE, bold, judge_says
from email_agent.react import play
from email_agent.tasks import Task
from email_agent.users import Played
from headrace_gateway.access import Caller
from headrace_gateway.feedback import events_of
from headrace_gateway.feedback_request import FeedbackRequest
from headrace_gateway.settings import FeedbackSettings, LimitSettings
from headrace_runtime.clock import SystemClock
from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_schemas.base import utcnow
from headrace_schemas.replay import FeedbackLine
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.learned.models import Features
from headrace_scorer.learned.replaying import LearnedReplay
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.learned.thumbs import FittedThumbs
from headrace_scorer.rescoring import Rescoring
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.settings import ScorerSettings

Say = Callable[[Played], Awaitable[None]]
_CALLER = Caller("", "", "default", frozenset(), None, LimitSettings())
_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Visit:
    """A session that is over. `accepted` is the truth, which only who measures knows."""

    run: Trajectory
    said: Sequence[Feedback]
    accepted: bool

    @property
    def edits(self) -> int:
        return sum(one.about == "edit" for one in self.said)


class Visitor(CapturingClient):
    """A client whose user also gives feedback."""

    said: list[Feedback]

    async def post(self, _path: str, *, body: object, cast_to: object) -> None:
        request = FeedbackRequest.model_validate_json(json.dumps(body))
        self.said = [
            *getattr(self, "said", ()),
            *events_of(request, _CALLER, SystemClock(), FeedbackSettings(), _BODY_BYTES),
        ]


class Traffic(World):
    """The world of `_learning_world` with users who speak."""

    def hold_back(self, kind: str) -> None:
        """Nobody asks questions of this kind."""
        self.asked = (task for task in self.asked if task.kind != kind)

    async def visits(self, version: str, sessions: int, say: Say, draw: random.Random) -> list[Visit]:
        """Sessions in the order in which they were opened. Each user draws by himself, whoever is served first."""

        room = asyncio.Semaphore(PLAYERS)

        async def one(task: Task) -> Visit:
            async with room:
                own = random.Random(draw.random())
                visitor = Visitor(self._completions, self._tokenizers[version], version, self.model)
                client = cast(AsyncOpenAI, visitor)
                episode = await play(client, version, self.tools, task.question, MAX_TOKENS)
                accepted = self.right(task, episode)
                await say(Played(client, version, self.tools, task, episode, accepted, own))
                return Visit(trajectory_of(visitor.turns, visitor.said), visitor.said, accepted)

        return list(await asyncio.gather(*map(one, itertools.islice(self.asked, sessions))))


class _Overheard(LearnedReplay):
    """A reward model whose thoughts are known, as it also is asked in `signals`."""

    def __init__(self, source: LearnedSource) -> None:
        super().__init__(source)
        self.heard: dict[str, float] = {}
        self._bold: dict[str, FittedThumbs] = {}

    async def fit(self) -> None:
        await super().fit()
        self._bold = {tenant: bold(one) for tenant, one in self._fitted.items() if isinstance(one, FittedThumbs)}

    def reward(self, trajectory: Trajectory, features: Features) -> dict[EntryKey, SourceReward]:
        fitted = self._bold.get(trajectory.tenant)
        likely = None if fitted is None else fitted.judge(features)
        if likely is not None:
            self.heard[trajectory.trajectory_id] = likely.value
        return super().reward(trajectory, features)


class Scoring:
    """The scorer of a stream, one batch of runs after the other. A reward model knows the thumbs of all before."""

    def __init__(self, settings: ScorerSettings, pool: FunctionPool, judge: np.random.Generator | None) -> None:
        self._settings, self._pool, self._judge = settings, pool, judge
        self._learning: _Overheard | None = None
        if settings.learned.model is not None:
            self._learning = _Overheard(LearnedSource(settings.learned, lambda: pool.functions))

    @property
    def heard(self) -> Mapping[str, float]:
        """By trajectory what its reward model thinks, also where it is not sure and says nothing."""
        return {} if self._learning is None else self._learning.heard

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: ScorerSettings, judge: np.random.Generator | None) -> AsyncIterator[Scoring]:
        """`judge`: a judge that is often wrong also speaks of each run."""
        pool = FunctionPool(settings)
        await pool.reload()
        try:
            yield cls(settings, pool, judge)
        finally:
            await pool.close()

    async def experiences(self, visits: Sequence[Visit]) -> list[Experience]:
        """Of the runs, in their order."""
        rescoring = Rescoring(self._settings, self._pool, self._learning)
        said = [one.model_dump(mode="json") for visit in visits for one in visit.said]
        for place, event in enumerate(said):
            rescoring.know("feedback", FeedbackLine(event=event, place=place).model_dump_json().encode())
        for reward in self._judged(visits):
            rescoring.know("reward", reward.to_json())
        made: list[Experience] = []
        for visit in visits:
            made += rescoring.taken(await rescoring.score(visit.run.to_json()))
        return [*made, *[one async for one in rescoring.learned()]]

    def _judged(self, visits: Sequence[Visit]) -> Iterator[Reward]:
        for visit in visits:
            said = None if self._judge is None else judge_says(self._judge, good=visit.accepted)
            if said is not None:
                yield Reward(
                    time=utcnow(),
                    trajectory_id=visit.run.trajectory_id,
                    session_key=visit.run.session_key,
                    source=JUDGE,
                    outcome="scored",
                    value=sum(said.values()) / len(said),
                    criteria=said,
                )
