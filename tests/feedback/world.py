"""The services in this world: the gateway's door and a scorer on a real database, fed in a random order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace_gateway.access import ALL_SCOPES, Caller
from headrace_gateway.feedback import events_of
from headrace_gateway.feedback_request import FeedbackRequest
from headrace_gateway.settings import FeedbackSettings, LimitSettings
from headrace_runtime.processor import Step, Unfinished
from headrace_runtime.wire import Record
from headrace_schemas import Branch, Event, Experience, Feedback, Span, Trajectory, ids
from headrace_schemas.envelope import Envelope
from headrace_scorer import schema, upkeep
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.handlers import Scorer
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache
from tests.feedback.sayings import LABELS, Answer, Saying, Scene
from tests.support.streams import START, Bench, ManualClock, Service, bench
from tests.support.turns import VERSION

PARTITIONS = 2
_WAIT_S = 600.0
_CALLER = Caller("k", "k", "default", ALL_SCOPES, None, LimitSettings())
_BATCH_MAX = 40
_TWICE = 0.05
Tick = Callable[[int], None]


def scenes(count: int, seed: int) -> list[Scene]:
    """One task for about every eight: what is said of a task concerns all of its runs again."""
    draw = random.Random(f"scenes {seed}")
    tasks = max(3, count // 8)
    made = []
    for number in range(count):
        key = ids.session_key("default", f"s{number}")
        turns = {ids.response_id(key): draw.choice([1, 1, 2]) for _ in range(draw.randint(1, 3))}
        made.append(Scene(f"s{number}", f"t{number % tasks}" if draw.random() < 0.6 else None, turns))
    return made


def branches(scene: Scene) -> list[list[Answer]]:
    """The first answers of all turns follow each other; each further answer begins a branch of its own."""
    first = [(turn, 0) for turn in scene.turns]
    return [first, *([answer] for answer in scene.answers if answer[1])]


def trajectory(scene: Scene) -> Trajectory:
    made = []
    for number, answers in enumerate(branches(scene)):
        spans = [
            Span(start=3 + 4 * at, logprobs=(-0.5, -0.25), turn_id=turn, choice=choice, version=VERSION)
            for at, (turn, choice) in enumerate(answers)
        ]
        made.append(Branch(token_ids=tuple(range(10 + number, 10 + number + 4 * len(answers) + 3)), spans=tuple(spans)))
    first = next(iter(scene.turns))
    return Trajectory(
        time=START,
        trajectory_id=ids.derived_id("trajectory", scene.session_id, first),
        session_key=ids.session_key("default", scene.session_id),
        session_id=scene.session_id,
        task_id=scene.task_id,
        model="m",
        branches=tuple(made),
        end_reason="end_call",
        started_at=START,
        turns_from=0,
    )


def events(one: Saying) -> list[Feedback]:
    """Through the door that HTTP has."""
    request = FeedbackRequest.model_validate(one.request)
    clock = ManualClock()
    clock.advance(one.skew_s)
    made = events_of(request, _CALLER, clock, FeedbackSettings(), 1024)
    if request.level == "task":
        return [event.model_copy(update={"partition": number}) for event in made for number in range(PARTITIONS)]
    return made


def partition_of(key: str) -> int:
    return sum(key.encode()) % PARTITIONS


@dataclass
class World:
    """A scorer that hears everything."""

    stream: Bench
    made: Scorer
    _offsets: dict[tuple[str, int], int] = field(default_factory=dict)

    async def play(self, sayings: Sequence[Saying], told: Sequence[Scene], seed: int, tick: Tick | None = None) -> None:
        """Deliver trajectories and feedback in a random order, some twice. Returns when nothing waits any more."""
        draw = random.Random(f"order {seed}")
        arriving: list[tuple[Event, int | None, int]] = []
        for scene in told:
            closed = trajectory(scene)
            arriving.append((closed, None, partition_of(closed.session_key)))
        for one in sayings:
            for event in events(one):
                number = event.partition if event.partition is not None else partition_of(event.session_key)
                arriving += [(event, one.place, number)] * (2 if draw.random() < _TWICE else 1)
        draw.shuffle(arriving)
        for at in range(0, len(arriving), _BATCH_MAX):
            batch = arriving[at : at + _BATCH_MAX]
            await self.stream.deliver(*(self._record(*one) for one in batch))
            await self._rematch()
            if tick is not None:
                tick(len(batch))
        self.stream.clock.advance(_WAIT_S + 1)
        scores = ScoreStore(TrajectoryCache())
        await self._all(lambda tx, now: upkeep.end_waiting(tx, now, scores, self.made.scoring.policy))

    async def _rematch(self) -> None:
        await self._all(self.made.rematch)

    async def _all(self, step: Step) -> None:
        more = True

        async def again(tx: Any, now: Any) -> Sequence[Event]:
            nonlocal more
            found = await step(tx, now)
            more = isinstance(found, Unfinished)
            return found

        while more:
            await self.stream.step(again)

    def _record(self, event: Event, place: int | None, partition: int) -> Record:
        """As a record that was put back: it keeps the place that it had on the log."""
        offset = self._offsets.get((event.topic, partition), 0)
        self._offsets[event.topic, partition] = offset + 1
        after = {"turns": 10**6, "trajectories": 10**6} if place is not None else None
        envelope = replace(Envelope.of(event, "headrace/gateway", after=after), sequence=place)
        return Record(event.topic, partition, offset, event.key.encode(), event.to_json(), envelope.headers())

    def newest(self) -> Mapping[str, Experience]:
        """The last revision of each experience. Raises `AssertionError` when a revision is missing or there twice."""
        found: dict[str, list[Experience]] = {}
        for one in self.stream.sent(Experience):
            found.setdefault(one.experience_id, []).append(one)
        for name, revisions in found.items():
            numbers = [one.revision for one in revisions]
            assert numbers == list(range(len(numbers))), f"{name} has revisions {numbers}"
        return {name: revisions[-1] for name, revisions in found.items()}


@contextlib.asynccontextmanager
async def world(url: str, data_dir: Path, **settings: Any) -> AsyncIterator[World]:
    chosen = ScorerSettings.model_validate({"labels": LABELS, "reward_wait_s": _WAIT_S, **settings})
    cache = TrajectoryCache()
    scores, pool = ScoreStore(cache), FunctionPool(chosen)
    made = Scorer(chosen, cache, scores, Scoring(pool, chosen, cache, scores))
    service = Service(
        tables=schema.stream,
        handlers={"trajectories": made.on_trajectory, "rewards": made.on_reward, "feedback": made.on_feedback},
        package="headrace_scorer",
    )
    async with bench(service, url, data_dir, ManualClock()) as stream:
        yield World(stream, made)
