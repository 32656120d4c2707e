"""The account of a client: the runs of its captured turns, as the collector divides them, and the turns that policy
gradients train."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_collector.closing import build_trajectory
from headrace_collector.digests import TurnContent
from headrace_collector.facts import turn_facts
from headrace_collector.runs import partition_runs, superseded_turns
from headrace_schemas import Trajectory, Turn
from headrace_schemas.values.base import utcnow
from headrace_trainer.experiences.restrictions import SetBuilder


@dataclass(frozen=True)
class ClientAccount:
    """Figures of the turns of one client."""

    calls: int
    sessions: int
    runs: int
    """Trajectories of its task, without side calls."""
    side_calls: int
    branches: int
    trained: int
    """Turns whose sampling distribution the trainer computes again, which every algorithm can train."""
    left_out: dict[str, int]
    """The other turns, by reason."""


def trajectories_of(turns: Sequence[Turn]) -> list[Trajectory]:
    """Return the trajectories of turns in the order of their capture, as the collector builds them."""
    sessions: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        sessions[turn.session_key].append(turn)
    return [trajectory for members in sessions.values() for trajectory in _of_session(members)]


def _of_session(turns: Sequence[Turn]) -> list[Trajectory]:
    now = utcnow()
    by_id = {turn.turn_id: turn for turn in turns}
    facts = [turn_facts(turn, now, offset) for offset, turn in enumerate(turns)]
    partition = partition_runs(facts, [])
    if partition.ties:
        partition = partition_runs(facts, [], {name: TurnContent.of(by_id[name]) for name in partition.ties})
    superseded = superseded_turns(facts)
    return [
        build_trajectory(
            [by_id[turn.turn_id] for turn in run.turns],
            superseded=superseded,
            about_run=(),
            about_session=(),
            reason="idle",
            models=run.models,
            is_side_call=run.is_side_call,
            turns_from=run.log_offset,
            now=now,
        )
        for run in partition.runs
    ]


def account_of(turns: Sequence[Turn], sets: SetBuilder) -> ClientAccount:
    """Return the account of all turns that a client made. `sets` computes the tokens that answers were sampled from."""
    trajectories = trajectories_of(turns)
    tasks = [trajectory for trajectory in trajectories if trajectory.untrained is None]
    reason_of: dict[str, str | None] = {}
    for trajectory in trajectories:
        if trajectory.untrained is not None:
            reason_of |= dict.fromkeys(trajectory.turn_ids, trajectory.untrained)
            continue
        reason_of |= {item.turn_id: item.full_reason for item in trajectory.left_out}
        for branch in trajectory.branches:
            problem = None if branch.sampled is None else sets.problem(branch.sampled)
            reason_of |= {span.turn_id: span.no_logprobs or problem for span in branch.spans}
    reasons = Counter(reason for reason in reason_of.values() if reason is not None)
    return ClientAccount(
        calls=len(turns),
        sessions=len({turn.session_key for turn in turns}),
        runs=len(tasks),
        side_calls=reasons["side_call"],
        branches=sum(len(trajectory.branches) for trajectory in tasks),
        trained=sum(reason is None for reason in reason_of.values()),
        left_out=dict(reasons),
    )
