"""A rig whose rollouts begin in the shadow: users outside the arms, and a fake gateway that answers their prompts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction

from sqlalchemy import select

from headrace_registry.rollouts.plan import RolloutStage
from headrace_registry.settings import RegistrySettings
from headrace_registry.shadow.rerun import ModelAnswer, RerunFailed, ScorableAnswer
from headrace_registry.storage.tables import PROMPTS
from headrace_schemas import Event, Feedback, FunctionCall, Message, Turn
from headrace_schemas.values import ids
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import Traffic, canary

SHADOW = {"tenants": [{"tenant": "default"}], "prompts_per_minute": 6000, "concurrency": 8}
DEMANDS = {"pairs_min": 10, "spoke_min": 10, "effective_min": 10, "effective_share_min": 0.1}
HALF = (RolloutStage(share=Fraction(1, 4), units_min=5), RolloutStage(share=Fraction(1, 2)))


def shadow_settings(units: int = 20, **changes: object) -> RegistrySettings:
    plan = {"shadow_units": units, "shadow": SHADOW, "shadow_demands": DEMANDS, "stages": HALF}
    return canary(**{**plan, **changes})


class FakeAnswers:
    """The gateway with collector and scorer behind it: a session of the shadow gets a turn and a reward when it ends.

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

    async def ask(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        await self._answers.open.wait()
        if self._answers.failing:
            self._answers.failing -= 1
            raise RerunFailed("the gateway answered 500")
        self.version = version
        script = self._answers.script
        return ModelAnswer(script.pop(0) if script else Message(role="assistant", content="hi"), 10)


class ShadowTraffic(Traffic):
    """Traffic while there is no split."""

    async def visit(self, count: int, *, feedback_value: float | None = None, **fields: object) -> list[str]:
        """Create `count` sessions of the champion, each with a turn, a reward and, with `feedback_value`, feedback."""
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
        """Until the shadow is over, one way or the other."""
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
    """A version that has passed the gate and is in the shadow."""
    version = await rig.checkpoint(step)
    async with rig.running():
        await rig.until(lambda: rig.routing.aliases.get("canary") == version)
    rig.follow()
    return version
