"""Trajectory scores: the rewards of all sources, the combined reward, and the experiences that result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Branch, Event, Experience, Reward, Trajectory
from headrace_scorer import feedback_entries, ledger, metrics, store
from headrace_scorer.feedback_entries import AnswerRemarks, Corrections, EntryKey
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.judge_monitor import JudgeMonitor
from headrace_scorer.learned.refitting import LearnedSource
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.reward_policy import RewardPolicy, SourceReward

_NOT_EMITTED: Mapping[str, Any] = {"revision": -1, "state": None, "rewarded": False}


@dataclass(slots=True)
class TrajectoryScore:
    """Rewards and state of one trajectory within one transaction. `row` is its locked row in `trajectories`.

    `ScoreStore.emit_if_ready` writes the changes of the row and the new ledger entries.
    """

    trajectory: Trajectory
    row: dict[str, Any]
    entries: LedgerEntries
    changes: dict[str, Any] = field(default_factory=dict)

    def change(self, **values: object) -> None:
        """Set columns of the trajectory's row. `ScoreStore.emit_if_ready` writes them to the database."""
        for name, value in values.items():
            if self.row[name] != value:
                self.row[name] = self.changes[name] = value


class ScoreStore:
    """Reads the scores of trajectories from the database, stores their changes, and returns the resulting experiences.

    Args:
        learned: reward model that adds its reward after all other sources; None for none.
        judge_monitor: monitor of the agreement between judges and people; None for none.
    """

    def __init__(
        self,
        cache: store.TrajectoryCache,
        learned: LearnedSource | None = None,
        judge_monitor: JudgeMonitor | None = None,
    ) -> None:
        self._cache = cache
        self._learned = learned
        self._judge_monitor = judge_monitor

    async def open(self, tx: AsyncConnection, trajectory_ids: Iterable[str]) -> dict[str, TrajectoryScore]:
        """Lock the rows of trajectories until the transaction ends, and return a score for each id in `trajectory_ids`.

        The result has the order of `trajectory_ids`, without the ids of trajectories that are not stored.
        """
        names = list(trajectory_ids)
        rows = await store.lock_rows(tx, names) if names else {}
        if not rows:
            return {}
        trajectories = await self._cache.get(tx, rows)
        entries = await ledger.read(tx, {name: row["tenant"] for name, row in rows.items()})
        return {
            name: TrajectoryScore(trajectories[name], dict(rows[name]), entries[name]) for name in names if name in rows
        }

    async def emit_if_ready(
        self, tx: AsyncConnection, now: datetime, scores: Iterable[TrajectoryScore], policy: RewardPolicy
    ) -> list[Event]:
        """Write the changes of scores to the database, and return the events to publish.

        The events are, for each score, new rewards of the reward model, then a new revision of each experience that has
        changed. The first revision waits until each expected source has answered, or until the wait is over. Later
        revisions follow at each change, but not while reward functions are being called again.
        """
        events: list[Event] = []
        ready = list(scores)
        for score in ready:
            events += await self._emit(tx, now, score, policy)
            await asyncio.sleep(0)  # so that large trajectories do not block the event loop together
        await ledger.save(tx, [score.entries for score in ready])
        await store.update_rows(tx, {score.trajectory.trajectory_id: score.changes for score in ready if score.changes})
        for score in ready:
            score.changes = {}
        return events

    async def _emit(
        self, tx: AsyncConnection, now: datetime, score: TrajectoryScore, policy: RewardPolicy
    ) -> list[Event]:
        settle_ms = score.row["settle_ms"]
        over = settle_ms is not None and settle_ms <= epoch_ms(now)
        learned = self._learned.name if self._learned is not None else ""
        events: list[Event] = []
        if over or _other_sources_answered(score, policy, learned):
            events += await self._add_learned_reward(tx, now, score)
        if over or _is_ready(score, policy):
            events += _experiences(score, now, policy)
            score.change(settle_ms=None)
            if over:
                score.change(scored_inputs=score.row["inputs"])
        return events

    async def _add_learned_reward(self, tx: AsyncConnection, now: datetime, score: TrajectoryScore) -> list[Event]:
        """Compare judges with people on the run, then store and return the reward model's new reward, if it has one."""
        if self._judge_monitor is not None:
            await self._judge_monitor.add_run(tx, now, score.trajectory, score.entries)
        if self._learned is None:
            return []
        arrived_ms = score.row["arrived_ms"]
        rewards = await self._learned.new_rewards(tx, now, score.trajectory, arrived_ms, score.entries)
        ledger.add_rewards(now, rewards, score.entries)
        return [*rewards]


def _other_sources_answered(score: TrajectoryScore, policy: RewardPolicy, learned: str) -> bool:
    """Return whether all sources except the reward model `learned` have answered, so that it may add its reward.

    For a trajectory that is not trained, the result is False.
    """
    row = score.row
    called = not policy.functions or row["scored_inputs"] == row["inputs"]
    waits = row["settle_ms"] is not None
    answered = row["emitted"] != "[]" or (waits and policy.have_others_answered(score.entries.current(), learned))
    return called and answered


def _is_ready(score: TrajectoryScore, policy: RewardPolicy) -> bool:
    """Return whether the experiences of the trajectory may be emitted before its wait for rewards is over.

    All reward functions must have run with the present feedback. In addition, either all expected rewards must have
    arrived, or the trajectory's experiences must have been emitted before.
    """
    row = score.row
    if policy.functions and row["scored_inputs"] != row["inputs"]:
        return False
    if row["emitted"] != "[]":
        return True
    return row["settle_ms"] is not None and policy.is_complete(score.entries.current())


def _experiences(score: TrajectoryScore, now: datetime, policy: RewardPolicy) -> list[Experience]:
    """Return the experiences that differ from the last emitted revision of their branch, and record them as emitted."""
    emitted: Sequence[Mapping[str, Any]] = json.loads(score.row["emitted"])
    source_rewards, corrections = score.entries.current(), score.entries.corrections()
    experiences = []
    states = []
    for index in range(len(score.trajectory.branches)):
        last = emitted[index] if emitted else _NOT_EMITTED
        candidate = experience(
            score.trajectory,
            index,
            source_rewards,
            corrections,
            policy,
            rewarded=last["rewarded"],
            now=now,
            revision=last["revision"] + 1,
            task_id=score.row["task_id"],
            run_id=score.row["run_id"],
            parts=score.row["parts"],
        )
        state = _state(candidate)
        if state != last["state"]:
            experiences.append(candidate)
            rewarded = last["rewarded"] or candidate.reward is not None
            last = {"revision": candidate.revision, "state": state, "rewarded": rewarded}
        states.append(last)
    score.change(emitted=json.dumps(states))
    if experiences and not emitted:
        age_s = (now - score.trajectory.time).total_seconds()
        metrics.EXPERIENCE_SECONDS.observe(max(0.0, age_s))
    for emission in experiences:
        metrics.EXPERIENCES.labels(emission.no_reward or "rewarded").inc()
    return experiences


def experience(
    trajectory: Trajectory,
    index: int,
    source_rewards: Sequence[SourceReward],
    corrections: Corrections,
    policy: RewardPolicy,
    *,
    rewarded: bool,
    now: datetime,
    revision: int,
    task_id: str | None,
    run_id: str | None,
    parts: int,
) -> Experience:
    """Build the experience of the branch with this index.

    Args:
        rewarded: whether an earlier revision had a reward. Then a missing reward counts as withdrawn.
        parts: number of sessions of the run, among which the weight of the run is divided.
    """
    branch = trajectory.branches[index]
    branch_rewards = feedback_entries.rewards_about_branch(source_rewards, branch)
    reward = policy.branch_reward(branch_rewards, branch.turn_ids, rewarded=rewarded)
    remarks: AnswerRemarks = feedback_entries.branch_remarks(branch, branch_rewards, corrections, policy)
    with_branch = reward.reward is not None or remarks.are_trainable_without_reward or policy.unrewarded_branches
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
        branch=branch if with_branch else None,
        turn_ids=branch.turn_ids,
        weight=1 / (_weighed_branches(trajectory, branch) * parts),
        reward=reward.reward,
        no_reward=reward.no_reward,
        parts=reward.parts,
        parts_left_out=reward.left_out,
        turn_rewards=remarks.turn_rewards,
        edits=remarks.edits,
        preferences=remarks.preferences,
    )


def _weighed_branches(trajectory: Trajectory, branch: Branch) -> int:
    """Return the number of branches among which the weight of the run is divided for `branch`.

    For a branch with logprobs, these are the branches with logprobs, because some algorithms train them alone. For a
    branch without logprobs, these are all branches.
    """
    with_logprobs = sum(other.sampled is not None for other in trajectory.branches)
    return with_logprobs if branch.sampled is not None else len(trajectory.branches)


def _state(experience: Experience) -> str:
    """Return a digest of the fields of an experience that a later revision may change.

    Fields that the first releases did not have enter the digest only if they are set, so that stored digests stay
    valid.
    """
    text = experience.model_dump_json(include={"reward", "no_reward", "parts", "weight", "task_id", "run_id"})
    if experience.parts_left_out:
        text += experience.model_dump_json(include={"parts_left_out"})
    if experience.turn_rewards or experience.edits or experience.preferences:
        text += experience.model_dump_json(include={"turn_rewards", "edits", "preferences"})
    return sha256(text.encode()).hexdigest()[:16]


def function_rewards(score: TrajectoryScore, now: datetime, source: str, outcome: Outcome) -> Iterator[Reward]:
    """Yield the rewards that follow from the outcome of one reward function for a trajectory.

    These are the reward of the run, the rewards of its turns, and a withdrawal for each turn that the function has
    rewarded earlier but not now.

    Args:
        score: the trajectory and its earlier rewards.
        now: the time of the rewards.
        source: source of the function's rewards.
        outcome: result of the function.
    """
    run_reward = Reward(
        time=now,
        trajectory_id=score.trajectory.trajectory_id,
        session_key=score.trajectory.session_key,
        tenant=score.trajectory.tenant,
        source=source,
        revision=score.entries.next_revision(EntryKey.reward(source)),
        outcome=outcome.outcome,
        value=outcome.value,
        criteria=outcome.criteria,
        reason=outcome.reason,
        judged_by=outcome.judged_by,
    )
    yield run_reward
    turns = turn_values(score.trajectory, outcome)
    earlier = {
        reward.turn_id
        for reward in score.entries.current()
        if reward.source == source and reward.turn_id and reward.outcome == "scored"
    }
    for turn_id in sorted({*turns, *earlier}):
        yield run_reward.model_copy(
            update={
                "turn_id": turn_id,
                "revision": score.entries.next_revision(EntryKey.reward(source, turn_id)),
                "outcome": "scored" if turn_id in turns else "withdrawn",
                "value": turns.get(turn_id),
                "criteria": {},
                "reason": None,
            }
        )


def turn_values(trajectory: Trajectory, outcome: Outcome) -> dict[str, float]:
    """Return the values of an outcome for turns that are in a branch."""
    branch_turns = set(store.branch_turns(trajectory))
    return {turn_id: value for turn_id, value in outcome.turns.items() if turn_id in branch_turns}
