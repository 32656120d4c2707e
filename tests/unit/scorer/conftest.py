"""Fixtures for the scorer on a real database, with reward functions called in this process. The test delivers the
events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.stream.processor import Step
from headrace_schemas import Event, Experience, Reward, Trajectory
from headrace_scorer import schema, upkeep
from headrace_scorer.functions import worker
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import CallRequest, Outcome
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.handlers import Scorer
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import CompletedJob, Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache
from tests.support.streams import Bench, ManualClock, Service, bench


class LocalPool(FunctionPool):
    """Function pool that calls the functions in this process."""

    def __init__(self, settings: ScorerSettings, functions: Sequence[Callable[..., object]]) -> None:
        super().__init__(settings)
        self.use(functions)

    def use(self, functions: Sequence[Callable[..., object]]) -> None:
        self._callables = {function.__name__: function for function in functions}
        self.functions = tuple(
            RewardFunction(
                name=name,
                spec=f"here:{name}",
                parameters=tuple(function.__code__.co_varnames[: function.__code__.co_argcount]),
                asynchronous=False,
                digest="0" * 64,
            )
            for name, function in self._callables.items()
        )

    async def call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        return worker.run(self._callables[call.function], call, trajectory)


@dataclass
class Rig:
    """A scorer with its bus."""

    stream: Bench
    scoring: Scoring
    pool: LocalPool
    settings: ScorerSettings

    async def deliver(self, *events: Event) -> None:
        """Deliver `events` as one batch, and run the reward functions of its jobs."""
        await self.stream.deliver(*events)
        await self.run_functions()

    async def run_functions(self) -> None:
        completed = await self.perform()
        if completed:
            await self.stream.step(self.scoring.result_step(completed))

    async def perform(self) -> list[CompletedJob]:
        """Run the functions of all waiting jobs, and return the results without entering them."""
        completed = []
        while not self.scoring._waiting.empty():
            completed.append(await self.scoring.perform(self.scoring._waiting.get_nowait()))
        return completed

    async def pass_time(self, seconds: float) -> None:
        self.stream.clock.advance(seconds)
        scores = ScoreStore(TrajectoryCache())
        await self.stream.step(lambda tx, now: upkeep.emit_overdue(tx, now, scores, self.scoring.policy))

    def rewards(self) -> list[tuple[str, int, str, float | None]]:
        return [(reward.source, reward.revision, reward.outcome, reward.value) for reward in self.stream.sent(Reward)]

    def experiences(self) -> list[tuple[int, int, float | None, str | None]]:
        """Return the branch, revision, reward and reason for a missing reward of each experience, in the order of
        publication."""
        sent = self.stream.sent(Experience)
        return [
            (experience.branch_index, experience.revision, experience.reward, experience.no_reward)
            for experience in sent
        ]


@contextlib.asynccontextmanager
async def scorer(url: str, data_dir: Path, *functions: Callable[..., object], **settings: Any) -> AsyncIterator[Rig]:
    chosen = ScorerSettings.model_validate(settings)
    cache = TrajectoryCache()
    scores, pool = ScoreStore(cache), LocalPool(chosen, functions)
    scoring = Scoring(pool, chosen, cache, scores)
    handlers = Scorer(chosen, cache, scores, scoring)
    service = Service(
        tables=schema.stream,
        handlers={
            "trajectories": handlers.on_trajectory,
            "rewards": handlers.on_reward,
            "feedback": handlers.on_feedback,
        },
        package="headrace_scorer",
    )
    async with bench(service, url, data_dir, ManualClock()) as stream:
        yield Rig(stream, scoring, pool, chosen)


def rematch_of(rig: Rig) -> Step:
    """Return the step that matches feedback about tasks."""
    return Scorer(rig.settings, rig.scoring._cache, rig.scoring._scores, rig.scoring).rematch


Open = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def open_scorer(database_url: str, data_dir: Path) -> Open:
    """Return a function that opens a scorer: `open_scorer(*functions, **settings)`."""
    return partial(scorer, database_url, data_dir)


def answer(trajectory: Trajectory, context: dict[str, Any]) -> float | None:
    """Return 1.0 if the final answer is the expected one, else 0.0. Return None while the expected answer is
    unknown."""
    if "expected" not in context:
        return None
    return float(trajectory.final_answer == context["expected"])


def half() -> float:
    return 0.5
