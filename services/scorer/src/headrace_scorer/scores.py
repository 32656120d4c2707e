"""The score of a trajectory: the rewards of its sources, the combined reward, and the experiences that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Event, Experience, Trajectory
from headrace_scorer import answer_remarks, ledger, metrics, store
from headrace_scorer.answer_remarks import AnswerRemarks, Given
from headrace_scorer.judge_watch import JudgeWatch
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.reward_policy import RewardPolicy, SourceReward

_NOT_EMITTED: Mapping[str, Any] = {"revision": -1, "state": None, "rewarded": False}


@dataclass(slots=True)
class TrajectoryScore:
    """The score of one trajectory, locked until the transaction ends. `row` is its row in `trajectories`."""

    trajectory: Trajectory
    row: dict[str, Any]
    entries: LedgerEntries
    changes: dict[str, Any] = field(default_factory=dict)

    def change(self, **values: object) -> None:
        """Set columns of the row; written by `ScoreStore.emit_if_ready`."""
        for name, value in values.items():
            if self.row[name] != value:
                self.row[name] = self.changes[name] = value


class ScoreStore:
    """Opens scores, and emits their experiences. `learned`: a reward model speaks, too, after all others."""

    def __init__(
        self,
        cache: store.TrajectoryCache,
        learned: LearnedSource | None = None,
        watch: JudgeWatch | None = None,
    ) -> None:
        self._cache = cache
        self._learned = learned
        self._watch = watch

    async def open(self, tx: AsyncConnection, trajectory_id: str) -> TrajectoryScore | None:
        """None when the trajectory is not known (any more)."""
        row = await store.lock(tx, trajectory_id)
        if row is None:
            return None
        trajectory = await self._cache.get(tx, trajectory_id)
        assert trajectory is not None  # its row is locked
        return TrajectoryScore(trajectory, dict(row), await ledger.read(tx, trajectory_id, trajectory.tenant))

    async def emit_if_ready(
        self, tx: AsyncConnection, now: datetime, score: TrajectoryScore, policy: RewardPolicy
    ) -> list[Event]:
        """Save the changes of the score. Returns a new revision of the experience of each branch that has changed, and
        before them what a reward model says anew.

        The first revision waits until each expected source has answered, or until the wait is over. Later revisions
        follow at each change, but not while reward functions are being called again.
        """
        settle_ms = score.row["settle_ms"]
        over = settle_ms is not None and settle_ms <= epoch_ms(now)
        learned = self._learned.name if self._learned is not None else ""
        events: list[Event] = []
        if over or _all_else_said(score, policy, learned):
            events += await self._speak_last(tx, now, score)
        if over or _ready(score, policy):
            events += _experiences(score, now, policy)
            score.change(settle_ms=None)
            if over:
                score.change(scored_inputs=score.row["inputs"])
        if score.changes:
            await store.change(tx, score.trajectory.trajectory_id, **score.changes)
            score.changes.clear()
        return events

    async def _speak_last(self, tx: AsyncConnection, now: datetime, score: TrajectoryScore) -> list[Event]:
        if self._watch is not None:
            await self._watch.note(tx, now, score.trajectory, score.entries)
        if self._learned is None:
            return []
        arrived_ms = score.row["arrived_ms"]
        made = await self._learned.speak(tx, now, score.trajectory, arrived_ms, score.entries)
        await ledger.enter(tx, now, made, score.entries)
        return [*made]


def _all_else_said(score: TrajectoryScore, policy: RewardPolicy, learned: str) -> bool:
    """Whether it is the turn of the reward model `learned`. Not of what is not trained: that waits for nothing."""
    row = score.row
    called = not policy.functions or row["scored_inputs"] == row["inputs"]
    waits = row["settle_ms"] is not None
    said = row["emitted"] != "[]" or (waits and policy.answered(score.entries.current(), learned))
    return called and said


def _ready(score: TrajectoryScore, policy: RewardPolicy) -> bool:
    row = score.row
    if policy.functions and row["scored_inputs"] != row["inputs"]:
        return False
    if row["emitted"] != "[]":
        return True
    return row["settle_ms"] is not None and policy.complete(score.entries.current())


def _experiences(score: TrajectoryScore, now: datetime, policy: RewardPolicy) -> list[Experience]:
    emitted: Sequence[Mapping[str, Any]] = json.loads(score.row["emitted"])
    source_rewards, given = score.entries.current(), score.entries.given()
    experiences = []
    states = []
    for index in range(len(score.trajectory.branches)):
        last = emitted[index] if emitted else _NOT_EMITTED
        made = experience(
            score.trajectory,
            index,
            source_rewards,
            given,
            policy,
            rewarded=last["rewarded"],
            now=now,
            revision=last["revision"] + 1,
            task_id=score.row["task_id"],
            run_id=score.row["run_id"],
            parts=score.row["parts"],
        )
        state = _state(made)
        if state != last["state"]:
            experiences.append(made)
            rewarded = last["rewarded"] or made.reward is not None
            last = {"revision": made.revision, "state": state, "rewarded": rewarded}
        states.append(last)
    score.change(emitted=json.dumps(states))
    if experiences and not emitted:
        age_s = (now - score.trajectory.time).total_seconds()
        metrics.EXPERIENCE_SECONDS.observe(max(0.0, age_s))
    for made in experiences:
        metrics.EXPERIENCES.labels(made.no_reward or "rewarded").inc()
    return experiences


def experience(
    trajectory: Trajectory,
    index: int,
    source_rewards: Sequence[SourceReward],
    given: Given,
    policy: RewardPolicy,
    *,
    rewarded: bool,
    now: datetime,
    revision: int,
    task_id: str | None,
    run_id: str | None,
    parts: int,
) -> Experience:
    """The experience of one branch. `rewarded`: it had a reward before."""
    branch = trajectory.branches[index]
    own = answer_remarks.about(source_rewards, branch)
    reward = policy.branch_reward(own, branch.turn_ids, rewarded=rewarded)
    said: AnswerRemarks = answer_remarks.remarks(branch, own, given, policy)
    wanted = reward.reward is not None or said.need_the_branch or policy.unrewarded_branches
    return Experience(
        time=now,
        experience_id=Experience.id_of(trajectory.trajectory_id, index),
        revision=revision,
        trajectory_id=trajectory.trajectory_id,
        session_key=trajectory.session_key,
        session_id=trajectory.session_id,
        tenant=trajectory.tenant,
        task_id=task_id,
        run_id=run_id,
        model=trajectory.model,
        branch_index=index,
        branch=branch if wanted else None,
        turn_ids=branch.turn_ids,
        weight=1 / (len(trajectory.branches) * parts),
        reward=reward.reward,
        no_reward=reward.no_reward,
        parts=reward.parts,
        parts_left_out=reward.left_out,
        turn_rewards=said.turn_rewards,
        edits=said.edits,
        preferences=said.preferences,
    )


def _state(made: Experience) -> str:
    """A digest of the fields that a later revision could change. Without remarks it is that of the first releases."""
    text = made.model_dump_json(include={"reward", "no_reward", "parts", "weight", "task_id", "run_id"})
    if made.parts_left_out:
        text += made.model_dump_json(include={"parts_left_out"})
    if made.turn_rewards or made.edits or made.preferences:
        text += made.model_dump_json(include={"turn_rewards", "edits", "preferences"})
    return sha256(text.encode()).hexdigest()[:16]
