"""Simulated traffic for rollouts: users that are assigned as by a gateway, a controlled clock, and fake shadow
answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollouts.plan import Guardrail, RolloutStage, Success
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.settings import GateSettings, RegistrySettings
from headrace_registry.shadow.rerun import ModelAnswer, RerunFailed, ScorableAnswer
from headrace_registry.storage import rollout_store, unit_store
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import PROMPTS, READINGS, UNITS
from headrace_schemas import (
    Choice,
    Event,
    Feedback,
    FunctionCall,
    Message,
    ModelEvent,
    Reward,
    Sampling,
    Turn,
    UnitAssignment,
    Usage,
)
from headrace_schemas.events.routing import TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from tests.unit.registry.rig import MODEL, Rig

HALF = (RolloutStage(share=Fraction(1, 2)),)
"""A share with which every unit is in one of the arms."""


def canary_settings(**changes: object) -> RegistrySettings:
    """Return settings of a canary that few sessions decide: only by rewards, at one session age, with wide margins."""
    plan: dict[str, object] = {
        "kind": "canary",
        "stages": HALF,
        "exposure_max": Fraction(1, 2),
        "guardrails": (Guardrail(metric="reward", margin=0.3, weight=8), Guardrail(metric="missing", margin=0.3)),
        "successes": (Success(metric="reward", margin=0.3),),
        "uneven": 0.5,
        "maturity_s": 60.0,
        "closing_s": 60.0,
    }
    gate = GateSettings(margin=0.25, anchor_margin=0.125, tasks_max=400, audit_tasks=4, attempts=2)
    return RegistrySettings(gate=gate, poll_s=0.01, rollout=RolloutSettings.model_validate(plan | changes))


class Traffic:
    """Users of the models in a rig. `rewards` maps versions to their mean reward, 0.7 by default."""

    def __init__(self, rig: Rig, seed: int) -> None:
        print(f"seed {seed}")
        self.rig = rig
        self.random = random.Random(seed)
        self.rewards: dict[str, float] = {}
        self.served: list[tuple[str, str]] = []
        """Unit and version."""
        self._count = 0

    @property
    def split(self) -> TrafficSplit:
        split = self.rig.routing.split
        assert split is not None
        return split

    def turn(self, session_key: str, version: str, assignment: UnitAssignment | None) -> Turn:
        return Turn(
            time=self.rig.clock.now(),
            turn_id=ids.response_id(session_key),
            session_key=session_key,
            session_id=session_key,
            session_source="header",
            model=MODEL,
            version=version,
            replica_id="r1",
            request_digest=hashlib.sha256(session_key.encode()).hexdigest(),
            messages=(Message(role="user", content="hello"),),
            sampling=Sampling(),
            prompt_token_ids=(1,),
            choices=(
                Choice(
                    index=0,
                    token_ids=(2,),
                    logprobs=(-0.5,),
                    finish_reason="stop",
                    message=Message(role="assistant", content="hi"),
                ),
            ),
            usage=Usage(prompt_tokens=1, completion_tokens=1),
            started_at=self.rig.clock.now(),
            assignment=assignment,
        )

    def reward(self, session_key: str, value: float, revision: int = 0) -> Reward:
        return Reward(
            time=self.rig.clock.now(),
            trajectory_id=f"t-{session_key}",
            session_key=session_key,
            source="function:answer",
            revision=revision,
            value=value,
        )

    async def sessions(self, count: int, *, rewarded: bool = True) -> list[str]:
        """Create `count` sessions, each with a turn and, with `rewarded`, a reward of 0 or 1. Return their keys."""
        events: list[Event] = []
        keys = []
        for _ in range(count):
            self._count += 1
            key = ids.session_key("default", f"session {self._count}")
            champion = self.rig.routing.champion
            assert champion is not None
            version, assignment = assign_unit(self.split, champion, key)
            self.served.append((key, version))
            keys.append(key)
            events.append(self.turn(key, version, assignment))
            if rewarded:
                right = self.random.random() < self.rewards.get(version, 0.7)
                events.append(self.reward(key, float(right)))
        await self.rig.process_events(*events)
        return keys

    async def advance(self, seconds: float) -> None:
        """Advance the rollouts' clock by `seconds`, as a consumer does that has read all records."""

        async def work(tx: AsyncConnection, _now: object) -> list[Event]:
            await self.rig.lease.check(tx)
            await unit_store.advance_clocks(tx, round(seconds * 1000))
            return []

        await self.rig.processor.step(work)
        self.rig.clock.elapsed_s += seconds
        self.rig.follow()
        await self.rig.model_controller.tick()

    async def until_over(self, sessions_max: int = 1500, at_once: int = 20) -> RolloutRecord:
        """Create sessions until the rollout ends, and return its record."""
        began = self._count
        last = await self.last()
        while last.is_under_way and self.rig.routing.split is not None:
            assert self._count - began < sessions_max, (last.statistics, self.rig.decided())
            await self.sessions(at_once)
            await self.advance(61)
            last = await self.last()
        return last

    async def last(self) -> RolloutRecord:
        async with self.rig.database.transaction() as tx:
            (rollout,) = await rollout_store.newest_rollouts(tx, MODEL, 1)
        return rollout

    async def readings(self) -> list[tuple[str, str, bool]]:
        """Return the look, the unit and whether the unit is the candidate's, for all stored readings in order."""
        async with self.rig.database.transaction() as tx:
            rows = await tx.execute(select(READINGS).order_by(READINGS.c.id))
            return [(row.look, row.unit, row.candidate) for row in rows]

    async def units(self) -> list[str]:
        async with self.rig.database.transaction() as tx:
            return list((await tx.execute(select(UNITS.c.unit))).scalars())


async def under_way(rig: Rig, step: int = 1, parent: str | None = None) -> str:
    """Publish a version that passes the gate, start its rollout, and return the version."""
    version = await rig.checkpoint(step, parent=parent)
    async with rig.running():
        await rig.until(lambda: rig.routing.split is not None and rig.routing.split.arms[-1].version == version)
    rig.follow()
    return version


def steps(rig: Rig, version: str) -> list[str]:
    """Return the kinds of the rollout decisions about `version` in the order of publication."""
    return [event.rollout.kind for event in rig.sent(ModelEvent) if event.rollout and event.version == version]


SHADOW = {"tenants": [{"tenant": "default"}], "prompts_per_minute": 6000, "concurrency": 8}
DEMANDS = {"pairs_min": 10, "spoke_min": 10, "effective_min": 10, "effective_share_min": 0.1}
HALVES = (RolloutStage(share=Fraction(1, 4), units_min=5), RolloutStage(share=Fraction(1, 2)))


def shadow_settings(units: int = 20, **changes: object) -> RegistrySettings:
    plan = {"shadow_units": units, "shadow": SHADOW, "shadow_demands": DEMANDS, "stages": HALVES}
    return canary_settings(**{**plan, **changes})


class FakeAnswers:
    """Fake gateway, collector and scorer: a session of the shadow gets a turn, and a reward when it ends.

    `rewards` maps versions to rewards, 0.7 by default; equal prompts get equal rewards. Answers wait until `open` is
    set.
    """

    def __init__(self) -> None:
        self.rig: Rig | None = None
        self.tools = self
        self.rewards: dict[str, float] = {}
        self.likes: dict[str, float] = {}
        """Mean logprob gain of a version's tokens, for weights."""
        self.answered: list[tuple[str, str, str]] = []
        """Session, version, and original session of each answer."""
        self.called: list[str] = []
        self.script: list[Message] = []
        self.failing = 0
        self.open = asyncio.Event()
        self.open.set()

    async def call(self, function: FunctionCall) -> str:
        self.called.append(function.name)
        return "a result"

    @contextlib.asynccontextmanager
    async def session(self, tenant: str, session_id: str, of: str) -> AsyncIterator[FakeModelSession]:
        asking = FakeModelSession(self)
        yield asking
        if asking.version is None or self.rig is None:
            return
        self.answered.append((session_id, asking.version, of))
        key = ids.session_key(tenant, session_id)
        traffic = Traffic(self.rig, 0)
        turn = traffic.turn(key, asking.version, None)
        is_champion = asking.version == self.rig.routing.champion
        good = random.Random(f"{is_champion} {of}").random() < self.rewards.get(asking.version, 0.7)
        shadow_turn = turn.model_copy(update={"purpose": "eval", "shadow_of": of, "session_id": session_id})
        await self.rig.process_events(shadow_turn, traffic.reward(key, float(good)))

    async def logprobs(self, version: str, answers: Sequence[ScorableAnswer]) -> list[list[float]] | None:
        return [[min(0.0, logprob + self.likes.get(version, 0.0)) for logprob in answer.logprobs] for answer in answers]

    async def stop(self) -> None:
        pass


class FakeModelSession:
    def __init__(self, answers: FakeAnswers) -> None:
        self._answers = answers
        self.version: str | None = None

    async def call_model(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        await self._answers.open.wait()
        if self._answers.failing:
            self._answers.failing -= 1
            raise RerunFailed("the gateway answered 500")
        self.version = version
        script = self._answers.script
        return ModelAnswer(script.pop(0) if script else Message(role="assistant", content="hi"), 10)


class ShadowTraffic(Traffic):
    """Traffic while a candidate is in the shadow, so that the champion serves all users."""

    async def visit(self, count: int, *, feedback_value: float | None = None, **fields: object) -> list[str]:
        """Create `count` sessions of the champion with a turn, a reward and optional feedback, and return their
        keys."""
        events: list[Event] = []
        keys = []
        champion = self.rig.routing.champion
        assert champion is not None
        for _ in range(count):
            self._count += 1
            key = ids.session_key("default", f"visit {self._count}")
            keys.append(key)
            turn = self.turn(key, champion, None).model_copy(update=fields)
            events += [turn, self.reward(key, float(self.random.random() < self.rewards.get(champion, 0.7)))]
            if feedback_value is not None:
                word = {
                    "feedback_id": f"f {key}",
                    "session_key": key,
                    "value": feedback_value,
                    "msg_ids": (turn.turn_id,),
                }
                events.append(Feedback.model_validate({"time": self.rig.clock.now(), **word}))
        await self.rig.process_events(*events)
        return keys

    async def until_canary(self, at_once: int = 10, steps_max: int = 40, **fields: object) -> None:
        """Create sessions until the shadow has ended, whatever its result."""
        for _ in range(steps_max):
            if (await self.last()).phase != "shadow":
                return
            await self.visit(at_once, feedback_value=1.0, **fields)
            await self.advance(61)
            await self.rig.answered()
        raise AssertionError((await self.last()).statistics)

    async def prompts(self) -> list[dict[str, object]]:
        async with self.rig.database.transaction() as tx:
            return [dict(row) for row in (await tx.execute(select(PROMPTS).order_by(PROMPTS.c.place))).mappings()]


async def begin_shadow(rig: Rig, step: int = 1) -> str:
    """Publish a version that passes the gate, start its shadow, and return the version."""
    version = await rig.checkpoint(step)
    async with rig.running():
        await rig.until(lambda: rig.routing.aliases.get("canary") == version)
    rig.follow()
    return version
