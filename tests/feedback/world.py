"""The services in this world: the gateway's door and a scorer on a real database, fed in a random order.

Random sequence of feedback about known answers, each with its request.

An entry has its meaning for the oracle and its request for the gateway.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headrace_gateway.access.keys import ALL_SCOPES, Caller
from headrace_gateway.requests.feedback import events_of
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.kafka.wire import Record
from headrace_runtime.stream.processor import Step, Unfinished
from headrace_schemas import Branch, Event, Experience, Feedback, Sampling, Span, Trajectory
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.events.trajectory import NoLogprobs
from headrace_schemas.rules.training import no_logprobs_reason
from headrace_schemas.values import ids
from headrace_scorer import schema, upkeep
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.handlers import Scorer
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache
from tests.support.streams import Bench, ManualClock, Service, bench
from tests.support.turns import START, VERSION, ask, user

Answer = tuple[str, int]
"""A turn's id and one of its choices."""
Form = Literal["number", "thumb", "rating", "label", "parts", "edit", "preference", "facts"]
Sampled = Literal["free", "temperature 0", "top_p", "foreign"]
Where = Literal["session", "all turns", "some turns", "turns", "answer", "task", "pair"]

LABELS: Mapping[str, float] = {"good": 1.0, "meh": 0.4, "bad": 0.0}
_WORDS = (*LABELS, "unheard-of")
_SOURCES = ("feedback", "user", "crowd")
_RATERS = (None, "ann", "bob")
_METRICS = (None, None, None, "tone", "truth")
_FORMS: tuple[tuple[Form, int], ...] = (
    ("number", 20), ("thumb", 10), ("rating", 10), ("label", 10), ("parts", 8), ("edit", 16), ("preference", 22),
    ("facts", 4),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """One session that is talked about."""

    session_id: str
    task_id: str | None
    turns: Mapping[str, int]
    """Turn to how many answers it has."""
    sampled: Mapping[str, Sampled] = field(default_factory=dict)
    """Turn to how its answers were sampled; `free` where it has no entry."""

    @property
    def answers(self) -> list[Answer]:
        return [(turn, choice) for turn, choices in self.turns.items() for choice in range(choices)]


@dataclass(frozen=True, slots=True)
class Saying:
    """One statement. `place` is where it stands in the order of the log."""

    number: int
    form: Form
    where: Where
    scene: Scene
    source: str
    rater: str | None
    metric: str | None = None
    turns: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    """The answer that is meant, or chosen and rejected."""
    content: Any = None
    withdrawn: bool = False
    named_as: str = ""
    skew_s: float = 0.0

    @property
    def request(self) -> dict[str, Any]:
        """The body of `POST /v1/feedback`."""
        body: dict[str, Any] = {"feedback_id": self.named_as, "source": self.source, "comment": f"number {self.number}"}
        body |= {"rater": self.rater, "metric": self.metric}
        body |= self._target() | ({"withdrawn": True} if self.withdrawn else self._form())
        if self.withdrawn and self.form == "edit":
            body["kind"] = "edit"
        return {name: value for name, value in body.items() if value is not None}

    def _form(self) -> dict[str, Any]:
        if self.form in ("number", "thumb"):
            return {"value": self.content}
        if self.form == "rating":
            rating, scale = self.content
            return {"rating": rating, "scale": scale}
        if self.form == "facts":
            return {"context": {"noted": self.number}}
        return {} if self.form == "preference" else {self.form: self.content}

    def _target(self) -> dict[str, Any]:
        if self.where == "pair":
            chosen, rejected = self.answers
            if chosen[0] == rejected[0]:
                return {"response_id": chosen[0], "preference": {"chosen": chosen[1], "rejected": rejected[1]}}
            sides = [{"response_id": turn, "choice": choice} if choice else turn for turn, choice in (chosen, rejected)]
            return {"preference": {"chosen": sides[0], "rejected": sides[1]}}
        if self.where == "answer":
            ((turn, choice),) = self.answers
            return {"response_id": turn, "choice": choice}
        if self.where == "task":
            return {"level": "task", "task_id": self.scene.task_id}
        if self.where == "session":
            return {"session_id": self.scene.session_id}
        level = {"level": "turn"} if self.where == "turns" else {}
        return {"msg_ids": list(self.turns), **level}


@dataclass
class Talk:
    """Draws statements. A `revised` share of them changes an earlier one, a `withdrawn` share takes one back."""

    scenes: Sequence[Scene]
    seed: int
    revised: float = 0.34
    withdrawn: float = 0.1
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def sayings(self, count: int) -> list[Saying]:
        sayings: list[Saying] = []
        for number in range(count):
            chance = self._draw.random()
            if sayings and chance < self.withdrawn:
                saying = self._take_back(self._draw.choice(sayings), number)
            elif sayings and chance < self.withdrawn + self.revised:
                saying = self._again(self._draw.choice(sayings), number)
            else:
                saying = self._new(number)
            sayings.append(replace(saying, named_as=f"f{number}", skew_s=self._draw.uniform(-3600, 3600)))
        return sayings

    def _new(self, number: int) -> Saying:
        draw, scene = self._draw, self._draw.choice(self.scenes)
        (form,) = draw.choices([form for form, _ in _FORMS], [weight for _, weight in _FORMS])
        saying = Saying(number, form, "session", scene, draw.choice(_SOURCES), draw.choice(_RATERS))
        if form == "preference":
            other = scene if draw.random() < 0.5 else draw.choice(self.scenes)
            pair = [draw.choice(scene.answers), draw.choice(other.answers)]
            if pair[0] == pair[1]:
                return self._new(number)
            return replace(saying, where="pair", answers=tuple(pair), metric=draw.choice(_METRICS))
        if form == "edit":
            return self._worded(replace(saying, where="answer", answers=(draw.choice(scene.answers),)))
        metric = draw.choice(_METRICS) if form != "parts" else None
        return self._worded(self._aimed(replace(saying, metric=metric)))

    def _aimed(self, saying: Saying) -> Saying:
        draw, turns = self._draw, list(saying.scene.turns)
        wheres: list[Where] = ["session", "all turns", "turns", "answer"]
        wheres += ["some turns"] if len(turns) > 1 else []
        wheres += ["task", "task", "task"] if saying.scene.task_id else []
        where = draw.choice(wheres)
        if where == "answer":
            return replace(saying, where=where, answers=(draw.choice(saying.scene.answers),))
        some = {
            "all turns": turns,
            "some turns": draw.sample(turns, max(1, len(turns) - 1)),
            "turns": [draw.choice(turns)],
        }
        return replace(saying, where=where, turns=tuple(some.get(where, ())))

    def _worded(self, saying: Saying) -> Saying:
        draw = self._draw
        words: dict[Form, Any] = {
            "number": round(draw.uniform(-1, 1), 3),
            "thumb": draw.random() < 0.5,
            "rating": (draw.randint(1, 5), [1, 5]),
            "label": draw.choice(_WORDS),
            "parts": {name: round(draw.random(), 2) for name in draw.sample(["tone", "truth", "care"], 2)},
            "edit": draw.choice([f"better {saying.number}", self._call(saying.number)]),
        }
        return replace(saying, content=words.get(saying.form))

    @staticmethod
    def _call(number: int) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"name": "look", "arguments": f'{{"at": {number}}}'}}]}

    def _again(self, old: Saying, number: int) -> Saying:
        """Repeat the rater's feedback with another value; a number may become a thumb, a preference may turn."""
        draw = self._draw
        if old.form == "preference":
            turned = old.answers if draw.random() < 0.3 else (old.answers[1], old.answers[0])
            return replace(old, number=number, answers=turned, withdrawn=False)
        forms: list[Form] = [old.form] if old.form in ("edit", "facts") else ["number", "thumb", "rating", "label"]
        saying = replace(old, number=number, form=draw.choice(forms), withdrawn=False)
        return self._worded(saying)

    def _take_back(self, old: Saying, number: int) -> Saying:
        return replace(old, number=number, withdrawn=True)


PARTITIONS = 2
_WAIT_S = 600.0
_CALLER = Caller("k", "k", "default", ALL_SCOPES, None, LimitSettings())
_BATCH_MAX = 40
OTHER_SERVER = "elsewhere@0123456789ab"
_SAMPLED: tuple[Sampled, ...] = ("free", "free", "temperature 0", "top_p", "foreign")
_REASONS: dict[Sampled, NoLogprobs | None] = {
    "free": no_logprobs_reason(ask([user("q")])),
    "temperature 0": no_logprobs_reason(ask([user("q")], sampling=Sampling(temperature=0.0))),
    "top_p": no_logprobs_reason(ask([user("q")], sampling=Sampling(top_p=0.9))),
    "foreign": "foreign",
}
_TWICE = 0.05
Tick = Callable[[int], None]


def scenes(count: int, seed: int) -> list[Scene]:
    """One task for about every eight scenes: feedback about a task concerns all of its runs again."""
    draw = random.Random(f"scenes {seed}")
    tasks = max(3, count // 8)
    all_scenes = []
    for number in range(count):
        key = ids.session_key("default", f"s{number}")
        turns = {ids.response_id(key): draw.choice([1, 1, 2]) for _ in range(draw.randint(1, 3))}
        sampled: dict[str, Sampled] = {turn: draw.choice(_SAMPLED) for turn in turns}
        all_scenes.append(Scene(f"s{number}", f"t{number % tasks}" if draw.random() < 0.6 else None, turns, sampled))
    return all_scenes


def branches(scene: Scene) -> list[list[Answer]]:
    """The first answers of all turns follow each other; each further answer begins a branch of its own."""
    first = [(turn, 0) for turn in scene.turns]
    return [first, *([answer] for answer in scene.answers if answer[1])]


def trajectory(scene: Scene) -> Trajectory:
    token_branches = []
    for number, answers in enumerate(branches(scene)):
        spans = [
            Span.model_validate({"start": 3 + 4 * at, "turn_id": turn, "choice": choice, **_sampling(scene, turn)})
            for at, (turn, choice) in enumerate(answers)
        ]
        token_branches.append(
            Branch(token_ids=tuple(range(10 + number, 10 + number + 4 * len(answers) + 3)), spans=tuple(spans))
        )
    first = next(iter(scene.turns))
    return Trajectory(
        time=START,
        trajectory_id=ids.derived_id("trajectory", scene.session_id, first),
        session_key=ids.session_key("default", scene.session_id),
        session_id=scene.session_id,
        task_id=scene.task_id,
        model="m",
        branches=tuple(token_branches),
        end_reason="end_call",
        started_at=START,
        turns_from=0,
    )


def _sampling(scene: Scene, turn: str) -> dict[str, Any]:
    """Return the fields of a span that depend on how the answer was sampled, by the rule of the collector."""
    reason = _REASONS[scene.sampled.get(turn, "free")]
    version = OTHER_SERVER if reason == "foreign" else VERSION
    return {"logprobs": (0.0, 0.0) if reason else (-0.5, -0.25), "no_logprobs": reason, "version": version}


def events(saying: Saying) -> list[Feedback]:
    """Through the door that HTTP has."""
    request = FeedbackRequest.model_validate(saying.request)
    clock = ManualClock()
    clock.advance(saying.skew_s)
    feedback_events = events_of(request, _CALLER, clock, 1024)
    if request.level == "task":
        return [
            event.model_copy(update={"partition": number}) for event in feedback_events for number in range(PARTITIONS)
        ]
    return feedback_events


def partition_of(key: str) -> int:
    return sum(key.encode()) % PARTITIONS


@dataclass
class World:
    """A scorer that hears everything."""

    stream: Bench
    scorer: Scorer
    _offsets: dict[tuple[str, int], int] = field(default_factory=dict)

    async def play(
        self, sayings: Sequence[Saying], scenes: Sequence[Scene], seed: int, tick: Tick | None = None
    ) -> None:
        """Deliver trajectories and feedback in a random order, some twice. Return when no work is left."""
        draw = random.Random(f"order {seed}")
        arriving: list[tuple[Event, int | None, int]] = []
        for scene in scenes:
            closed = trajectory(scene)
            arriving.append((closed, None, partition_of(closed.session_key)))
        for saying in sayings:
            for event in events(saying):
                number = event.partition if event.partition is not None else partition_of(event.session_key)
                arriving += [(event, saying.number, number)] * (2 if draw.random() < _TWICE else 1)
        draw.shuffle(arriving)
        for at in range(0, len(arriving), _BATCH_MAX):
            batch = arriving[at : at + _BATCH_MAX]
            await self.stream.deliver(*(self._record(*saying) for saying in batch))
            await self._rematch()
            if tick is not None:
                tick(len(batch))
        self.stream.clock.advance(_WAIT_S + 1)
        scores = ScoreStore(TrajectoryCache())
        await self._all(lambda tx, now: upkeep.emit_overdue(tx, now, scores, self.scorer.scoring.policy))

    async def _rematch(self) -> None:
        await self._all(self.scorer.rematch)

    async def _all(self, step: Step) -> None:
        more = True

        async def again(tx: Any, now: Any) -> Sequence[Event]:
            nonlocal more
            sent = await step(tx, now)
            more = isinstance(sent, Unfinished)
            return sent

        while more:
            await self.stream.step(again)

    def _record(self, event: Event, sequence: int | None, partition: int) -> Record:
        """Return the record of an event. A retried record keeps the offset that it had on the log."""
        offset = self._offsets.get((event.topic, partition), 0)
        self._offsets[event.topic, partition] = offset + 1
        after = {"turns": 10**6, "trajectories": 10**6} if sequence is not None else None
        envelope = replace(Envelope.of(event, "headrace/gateway", after=after), sequence=sequence)
        return Record(event.topic, partition, offset, event.key.encode(), event.to_json(), envelope.headers())

    def newest(self) -> Mapping[str, Experience]:
        """The last revision of each experience. Raises `AssertionError` when a revision is missing or there twice."""
        revisions_of: dict[str, list[Experience]] = {}
        for experience in self.stream.sent(Experience):
            revisions_of.setdefault(experience.experience_id, []).append(experience)
        for name, revisions in revisions_of.items():
            numbers = [experience.revision for experience in revisions]
            assert numbers == list(range(len(numbers))), f"{name} has revisions {numbers}"
        return {name: revisions[-1] for name, revisions in revisions_of.items()}


@contextlib.asynccontextmanager
async def world(url: str, data_dir: Path, **settings: Any) -> AsyncIterator[World]:
    chosen = ScorerSettings.model_validate({"labels": LABELS, "reward_wait_s": _WAIT_S, **settings})
    cache = TrajectoryCache()
    scores, pool = ScoreStore(cache), FunctionPool(chosen)
    scorer = Scorer(chosen, cache, scores, Scoring(pool, chosen, cache, scores))
    service = Service(
        tables=schema.stream,
        handlers={"trajectories": scorer.on_trajectory, "rewards": scorer.on_reward, "feedback": scorer.on_feedback},
        package="headrace_scorer",
    )
    async with bench(service, url, data_dir, ManualClock()) as stream:
        yield World(stream, scorer)
