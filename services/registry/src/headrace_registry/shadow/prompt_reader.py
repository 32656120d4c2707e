"""Computes the metrics of the three sessions of a shadow's prompt (the candidate's, the champion's and the user's), and
the findings of a shadow when it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import SHADOW_PROMPTS
from headrace_registry.rollouts import findings, metrics
from headrace_registry.rollouts.estimate import ShadowPair, estimate
from headrace_registry.rollouts.findings import ShadowFindings, expectations
from headrace_registry.rollouts.metrics import Metric, MetricFailed, SessionRecord, compute_metrics
from headrace_registry.rollouts.state_machine import RolloutDecision
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompts import ANSWERING, PromptRecord, Side
from headrace_registry.shadow.rerun import first_run, is_opening, is_single_run
from headrace_registry.storage import unit_store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import ROLLOUTS
from headrace_runtime.stream.processor import Processor, Unfinished
from headrace_schemas import Event
from headrace_schemas.values.base import Finite, Model, Text

JUDGE_METRIC = "reward"
"""Metric that is used as the judges' score."""
USER_METRIC = "satisfaction"
"""Metric that is used as the feedback of users."""
_USERS = "feedback"
"""Source of rewards from users. Answers of a shadow have none."""
_SIDES: tuple[Side, ...] = ("logged", *ANSWERING)
_AT_ONCE_MAX = 20
_NUMBERS_MAX = 64
"""Maximum number of statistics of a decision."""
_PROMPTS_MAX = 100_000


class PromptReading(Model):
    """Metric values of the three sessions of a prompt: the candidate's, the champion's and the user's own."""

    kinds: tuple[Text, ...] = ()
    candidate: dict[Text, Finite]
    champion: dict[Text, Finite]
    logged: dict[Text, Finite]
    """Metric values of the user's session, which are also used for the expected values of later sessions."""
    judged: dict[Text, Finite]
    """Judges' score of each session."""
    said: Finite | None = None

    @property
    def both_judged(self) -> bool:
        return all(side in self.judged for side in ANSWERING)


def pair_of(prompt: PromptRecord, reading: PromptReading) -> ShadowPair | None:
    """Return the scores of a prompt for the estimate, or None unless both new answers have a judges' score."""
    if not reading.both_judged or set(prompt.ended.values()) != {"answered"}:
        return None
    return ShadowPair(
        number=prompt.number,
        candidate=reading.judged["candidate"],
        champion=reading.judged["champion"],
        judged=reading.judged.get("logged"),
        user_value=reading.said,
        log_weight=prompt.log_weight,
    )


def metric_pair(prompt: PromptRecord) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metric values of the candidate's and of the champion's answer; empty unless both were completed."""
    reading = PromptReading.model_validate(prompt.found)
    both_answered = set(prompt.ended.values()) == {"answered"}
    return (dict(reading.candidate), dict(reading.champion)) if both_answered else ({}, {})


def read_prompt(
    prompt: PromptRecord, sessions: Mapping[Side, Sequence[SessionRecord]], rollout_metrics: Mapping[str, Metric]
) -> PromptReading:
    """Compute the metric values of a prompt's three sessions. Raises `MetricFailed`."""
    turns = [turn for session in sessions["logged"] for turn in session.turns]
    opening = next((turn for turn in turns if is_opening(turn)), None)
    judge, user = metrics.metric_named(JUDGE_METRIC), metrics.metric_named(USER_METRIC)
    single_run = is_single_run(turns) and bool(first_run(turns))
    judged_sessions = {side: sessions[side] for side in ANSWERING}
    if single_run:
        judged_sessions["logged"] = [_without_users(session) for session in sessions["logged"]]
    judged = {side: _goodness(judge, JUDGE_METRIC, side_sessions) for side, side_sessions in judged_sessions.items()}
    user_score = _goodness(user, USER_METRIC, sessions["logged"]) if single_run else None
    return PromptReading(
        kinds=findings.prompt_kinds(opening) if opening else (),
        candidate=compute_metrics(sessions["candidate"], rollout_metrics),
        champion=compute_metrics(sessions["champion"], rollout_metrics),
        logged=compute_metrics(sessions["logged"], rollout_metrics),
        judged={side: value for side, value in judged.items() if value is not None},
        said=user_score,
    )


def _read_events(
    prompt: PromptRecord, events: Mapping[Side, Sequence[tuple[str, bytes]]], rollout_metrics: Mapping[str, Metric]
) -> PromptReading:
    """Parse the events of a prompt's three sessions, which may take seconds, and compute their metric values."""
    sessions = {side: unit_store.session_records(side_events) for side, side_events in events.items()}
    return read_prompt(prompt, sessions, rollout_metrics)


def _goodness(metric: Metric, name: str, sessions: Sequence[SessionRecord]) -> float | None:
    values = compute_metrics(sessions, {name: metric})
    return metric.goodness(values[name]) if values else None


def _without_users(session: SessionRecord) -> SessionRecord:
    rewards = tuple(reward for reward in session.rewards if reward.source != _USERS)
    return SessionRecord(session.session_key, session.turns, session.trajectories, rewards, session.feedback)


class PromptReader:
    """Computes the metrics of prompts whose answers were given time to be judged. Call `read_due` in each round."""

    def __init__(self, processor: Processor, lease: LeaderLease) -> None:
        self._processor = processor
        self._lease = lease

    async def read_due(self, rollout: RolloutRecord, rollout_metrics: Mapping[str, Metric]) -> None:
        """Compute and store the metrics of those prompts of a rollout that are due. Raises `MetricFailed`."""
        failed: list[MetricFailed] = []
        age_ms = round(rollout.plan.maturity_s * 1000)

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            readable = await prompts.readable_prompts(tx, rollout, age_ms, _AT_ONCE_MAX)
            for prompt in readable:
                events = {side: await prompts.side_events(tx, prompt, side) for side in _SIDES}
                try:
                    reading = await asyncio.to_thread(_read_events, prompt, events, rollout_metrics)
                except MetricFailed as error:
                    failed[:] = [error]
                    return ()
                await prompts.record_reading(tx, prompt, reading.model_dump(mode="json", exclude_none=True))
                SHADOW_PROMPTS.labels(rollout.model, "read").inc()
            return Unfinished() if len(readable) == _AT_ONCE_MAX else ()

        more = True
        while more:
            more = await self._processor.step(work)
            if failed:
                raise failed[0]


async def record_outcome(tx: AsyncConnection, rollout: RolloutRecord, decision: RolloutDecision) -> RolloutDecision:
    """Store the findings of a shadow that ends with `decision`. Return the decision with the findings added to its
    reason and statistics.

    Afterwards the sessions of the shadow may be assigned to arms of rollouts.
    """
    findings = await load_findings(tx, rollout)
    await prompts.release_sessions(tx, rollout.rollout_id)
    values = {"shadow": findings.model_dump_json(exclude_none=True)}
    await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(values))
    numbers = dict([*findings.statistics().items(), *decision.statistics.items()][:_NUMBERS_MAX])
    return replace(decision, reason=f"{decision.reason}; {findings.in_words()}", statistics=numbers)


async def load_findings(tx: AsyncConnection, rollout: RolloutRecord) -> ShadowFindings:
    """Return the findings of a shadow from the prompts that were evaluated so far."""
    return summarize_prompts(await prompts.all_prompts(tx, rollout.rollout_id, _PROMPTS_MAX), rollout)


def summarize_prompts(prompts_taken: Sequence[PromptRecord], rollout: RolloutRecord) -> ShadowFindings:
    """Compute the findings of a shadow from its prompts, which must be in their order."""
    readings = [
        (prompt, PromptReading.model_validate(prompt.found))
        for prompt in prompts_taken
        if prompt.state == "read" and prompt.found
    ]
    pairs = [pair for prompt, reading in readings if (pair := pair_of(prompt, reading)) is not None]
    sessions = [
        (reading.kinds, values)
        for prompt, reading in readings
        for values, answered in (
            (reading.logged, True),
            *((getattr(reading, side), prompt.ended.get(side) == "answered") for side in ANSWERING),
        )
        if answered
    ]
    ended: Counter[str] = Counter()
    for prompt in prompts_taken:
        ended.update(f"{side}: {outcome}" for side, outcome in prompt.ended.items() if outcome != "answered")
    left_out = Counter(prompt.reason for prompt in prompts_taken if prompt.state == "left_out")
    return ShadowFindings.of(
        estimate(pairs, rollout.plan.shadow_demands),
        prompts=len(prompts_taken),
        read=len(readings),
        ended=dict(ended),
        left_out=dict(left_out.most_common(8)),
        tokens=sum(prompt.tokens for prompt in prompts_taken),
        expected=expectations(sessions).table,
    )
