"""What a prompt's three sessions were like, at an age."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.leader import LeaderLease
from headrace_registry.metrics import SHADOW_PROMPTS
from headrace_registry.rollouts import ledger, metrics
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.measuring import MetricFailed, measured
from headrace_registry.rollouts.metrics import Metric
from headrace_registry.rollouts.records import SessionRecord
from headrace_registry.shadow import expectations, prompts
from headrace_registry.shadow.estimate import ShadowPair
from headrace_registry.shadow.prompts import ANSWERING, KeptPrompt, Side
from headrace_registry.shadow.recording import first_run, is_opening, is_whole
from headrace_runtime.processor import Processor, Unfinished
from headrace_schemas import Event
from headrace_schemas.base import Finite, Model, Text

JUDGED = "reward"
"""The metric that stands for the judges."""
SAID = "satisfaction"
"""The one that stands for the user."""
_USERS = "feedback"
"""The source of rewards that users give. No new answer has any."""
_AT_ONCE_MAX = 20


class PromptReading(Model):
    """A row of it is kept until its rollout is forgotten."""

    kinds: tuple[Text, ...] = ()
    candidate: dict[Text, Finite]
    champion: dict[Text, Finite]
    logged: dict[Text, Finite]
    """What is expected of sessions is learned of these, too."""
    judged: dict[Text, Finite]
    """By side."""
    said: Finite | None = None

    @property
    def both_judged(self) -> bool:
        return all(side in self.judged for side in ANSWERING)


def pair_of(prompt: KeptPrompt, reading: PromptReading) -> ShadowPair | None:
    """None: it did not come to two answers with a judgement each."""
    if not reading.both_judged or set(prompt.ended.values()) != {"answered"}:
        return None
    return ShadowPair(
        number=prompt.place,
        candidate=reading.judged["candidate"],
        champion=reading.judged["champion"],
        judged=reading.judged.get("logged"),
        said=reading.said,
        log_weight=prompt.log_weight,
    )


def compared(prompt: KeptPrompt) -> tuple[dict[str, float], dict[str, float]]:
    """What the metrics say of both answers; nothing unless both are whole."""
    reading = PromptReading.model_validate(prompt.found)
    whole = set(prompt.ended.values()) == {"answered"}
    return (dict(reading.candidate), dict(reading.champion)) if whole else ({}, {})


def read_prompt(
    prompt: KeptPrompt, sessions: Mapping[Side, Sequence[SessionRecord]], wanted: Mapping[str, Metric]
) -> PromptReading:
    """Raises `MetricFailed`."""
    turns = [turn for one in sessions["logged"] for turn in one.turns]
    opening = next((turn for turn in turns if is_opening(turn)), None)
    judge, user = metrics.named(JUDGED), metrics.named(SAID)
    alone = is_whole(turns) and bool(first_run(turns))
    known = {side: sessions[side] for side in ANSWERING}
    if alone:
        known["logged"] = [_without_users(one) for one in sessions["logged"]]
    judged = {side: _goodness(judge, JUDGED, of) for side, of in known.items()}
    said = _goodness(user, SAID, sessions["logged"]) if alone else None
    return PromptReading(
        kinds=expectations.kinds(opening) if opening else (),
        candidate=measured(sessions["candidate"], wanted),
        champion=measured(sessions["champion"], wanted),
        logged=measured(sessions["logged"], wanted),
        judged={side: value for side, value in judged.items() if value is not None},
        said=said,
    )


def _goodness(metric: Metric, name: str, of: Sequence[SessionRecord]) -> float | None:
    found = measured(of, {name: metric})
    return metric.goodness(found[name]) if found else None


def _without_users(one: SessionRecord) -> SessionRecord:
    rewards = tuple(reward for reward in one.rewards if reward.source != _USERS)
    return SessionRecord(one.session_key, one.turns, one.trajectories, rewards, one.feedback)


class PromptReader:
    """`take` in each round: reads the prompts whose answers had their time to be judged."""

    def __init__(self, processor: Processor, lease: LeaderLease) -> None:
        self._processor = processor
        self._lease = lease

    async def take(self, rollout: KeptRollout, wanted: Mapping[str, Metric]) -> None:
        """Raises `MetricFailed`."""
        failed: list[MetricFailed] = []
        age_ms = round(rollout.plan.maturity_s * 1000)

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            due = await prompts.readable(tx, rollout, age_ms, _AT_ONCE_MAX)
            for prompt in due:
                sessions = {
                    side: ledger.sessions(await prompts.events(tx, prompt, side)) for side in ("logged", *ANSWERING)
                }
                try:
                    found = await asyncio.to_thread(read_prompt, prompt, sessions, wanted)
                except MetricFailed as error:
                    failed[:] = [error]
                    return ()
                await prompts.note(tx, prompt, found.model_dump(mode="json", exclude_none=True))
                SHADOW_PROMPTS.labels(rollout.model, "read").inc()
            return Unfinished() if len(due) == _AT_ONCE_MAX else ()

        more = True
        while more:
            more = await self._processor.step(work)
            if failed:
                raise failed[0]
