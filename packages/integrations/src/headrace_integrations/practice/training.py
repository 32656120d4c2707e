"""Training steps on runs of tasks (`train_on_tasks`), and the training outcomes of their sessions, read from the bus.

The result of a step (`Step`) contains the outcomes that the services report.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import Unreachable, UsageError
from headrace.following import Follower
from headrace.topics import Topics, connected
from headrace_integrations.practice.runs import Play, Run
from headrace_integrations.stack import Stack
from headrace_schemas import Experience, TrainingMetrics, Trajectory, Turn
from headrace_schemas.values import ids


@dataclass(frozen=True)
class Step:
    """Result of one training step.

    Attributes:
        number: number of the step, from 1.
        trained: number of trained experiences.
        dropped: number of dropped experiences by reason.
        version: version that was trained on the runs, or None if the trainer makes a version after several steps.
        decision: the registry's decision about `version`.
        champion: version that serves after the step.
    """

    number: int
    runs: tuple[Run, ...]
    trained: int
    dropped: Mapping[str, int] = field(default_factory=Counter)
    version: str | None = None
    decision: str | None = None
    champion: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the trainer: loss, entropy, gradient norm and others."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors of the runs that failed and therefore have no reward."""
        return tuple(run.error for run in self.runs if run.error is not None)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the runs that have a reward, or None if there are none."""
        return mean([run.value for run in self.runs if run.value is not None])

    @property
    def run_metrics(self) -> dict[str, float]:
        """Mean of each metric over the runs that reported it."""
        names = {name for run in self.runs for name in run.metrics}
        means = {name: mean([run.metrics[name] for run in self.runs if name in run.metrics]) for name in sorted(names)}
        return {name: value for name, value in means.items() if value is not None}


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


async def train_on_tasks(
    stack: Stack,
    tasks: Sequence[object],
    play: Play,
    *,
    group_size: int = 8,
    tasks_per_step: int = 8,
    steps: int = 1,
    at_once: int = 16,
    timeout_s: float = 600.0,
) -> AsyncIterator[Step]:
    """Train on tasks step by step and yield the result of each step.

    Each step plays the next `tasks_per_step` tasks `group_size` times each. It ends when the trainer has reported the
    outcome of each run and the resulting version serves or was refused. The step after the last task begins with the
    first task again. A run whose `play` raises or gives no reward fails: it gets no reward, and its group is trained
    without it.

    Args:
        play: function that runs the agent on a task once.
        at_once: number of concurrent runs.
        timeout_s: time limit in seconds for the services to report the outcomes of a step.

    Raises:
        Unreachable: outcomes are missing after `timeout_s`.
        UsageError: no run of a step has a reward.
    """
    if not 1 <= tasks_per_step <= len(tasks):
        raise UsageError(f"tasks_per_step = {tasks_per_step}: must be from 1 to the number of tasks, {len(tasks)}")
    if group_size < 1 or steps < 1 or at_once < 1:
        raise UsageError("group_size, steps and at_once: must be at least 1")
    watch, next_tasks = OutcomeWatch(stack), itertools.cycle(tasks)
    await watch.begin()
    async with stack.async_client() as client:
        for number in range(1, steps + 1):
            step_tasks = [next(next_tasks) for _ in range(tasks_per_step)]
            runs = [
                Run(stack, client, task, purpose="train", model=stack.model)
                for task in step_tasks
                for _ in range(group_size)
            ]
            await play_all(runs, play, at_once)
            yield await _finish_step(stack, watch, number, runs, timeout_s)


practise = train_on_tasks
"""Earlier name of `train_on_tasks`."""


async def play_all(runs: Sequence[Run], play: Play, at_once: int) -> None:
    """Play all runs, `at_once` of them concurrently."""
    slots = asyncio.Semaphore(at_once)

    async def play_run(run: Run) -> None:
        async with slots:
            await run.execute(play)

    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(play_run(run))


async def _finish_step(stack: Stack, watch: OutcomeWatch, number: int, runs: Sequence[Run], timeout_s: float) -> Step:
    rewarded_runs = {run.session_ids[role]: run for run in runs for role in run.rewards if role in run.session_ids}
    if not rewarded_runs:
        first_error = next((run.error for run in runs if run.error), "no run called the model")
        raise UsageError(f"step {number}: none of {len(runs)} runs has a reward; the first error: {first_error}")
    outcomes = await watch.until_known(rewarded_runs, timeout_s)
    for session, run in rewarded_runs.items():
        if outcomes[session].trajectory is None:
            run.error = run.error or "it made no call to the model"
    version = max(outcomes.values(), key=lambda outcome: outcome.account).version
    decision = await stack.until_decided(version, timeout_s) if version is not None else None
    watch.forget(rewarded_runs)
    return Step(
        number=number,
        runs=tuple(runs),
        trained=sum(outcome.trained for outcome in outcomes.values()),
        dropped=Counter(reason for outcome in outcomes.values() for reason in outcome.dropped),
        version=version,
        decision=decision,
        champion=await asyncio.to_thread(stack.serving),
        metrics=dict(watch.metrics),
    )


_POLL_S = 0.2
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """Training outcome of a session: its trained and dropped experiences. A session without calls has none.

    Attributes:
        trained: number of trained experiences.
        dropped: reason for each dropped experience.
        version: newest version that was trained on the session, or None if training continues before the next version.
        account: number of the newest trainer report about the session.
    """

    trained: int = 0
    dropped: tuple[str, ...] = ()
    version: str | None = None
    account: int = -1
    """Number of the trainer report with the newest outcome of the session."""
    trajectory: Trajectory | None = None


class OutcomeWatch:
    """Determines from the topics whether sessions were trained.

    It reads from the beginning of the topics, and stores the state of each session until the caller passes the session
    to `forget`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._follow = Follower(Turn.topic, Trajectory.topic, TrainingMetrics.topic)
        self._has_begun = False
        self._keys_with_turns: set[str] = set()
        self._trajectories: dict[str, dict[str, Trajectory]] = {}
        self._outcomes: dict[str, tuple[str, int]] = {}
        """Reason for dropping (empty if trained) and number of the trainer report, by experience id."""
        self._versions: dict[int, str] = {}
        self.metrics: dict[str, float] = {}
        """Metrics of the newest step."""

    async def begin(self) -> None:
        """Skip all records that are on the topics now, so that only later sessions are seen.

        Repeated calls have no effect.
        """
        if not self._has_begun:
            async with connected(self._stack.bus) as topics:
                await self._follow.begin(topics)
            self._has_begun = True

    async def until_known(self, sessions: Collection[str], timeout_s: float) -> dict[str, SessionOutcome]:
        """Wait until the trainer has reported the outcome of each session and return the outcomes.

        Raises:
            Unreachable: an outcome is missing after `timeout_s`. Incomplete outcomes are never returned.
        """
        deadline = time.monotonic() + timeout_s
        async with connected(self._stack.bus) as topics:
            while True:
                await self._read(topics)
                outcomes = {session: self._outcome(session) for session in sessions}
                decided = {session: outcome for session, outcome in outcomes.items() if outcome is not None}
                if len(decided) == len(outcomes):
                    return decided
                if time.monotonic() > deadline:
                    raise Unreachable(self._timeout_message(outcomes, timeout_s))
                await asyncio.sleep(_POLL_S)

    async def until_closed(self, session: str, timeout_s: float) -> Trajectory | None:
        """Return the trajectory of an ended session, or None if it made no call."""
        deadline = time.monotonic() + timeout_s
        async with connected(self._stack.bus) as topics:
            while True:
                await self._read(topics)
                trajectories = self._trajectories.get(session, {})
                if trajectories or self._key(session) not in self._keys_with_turns:
                    return next(reversed(trajectories.values()), None)
                if time.monotonic() > deadline:
                    raise Unreachable(f"session {session} is not closed after {timeout_s:g} s; see `headrace status`")
                await asyncio.sleep(_POLL_S)

    def forget(self, sessions: Collection[str]) -> None:
        """Remove the state of sessions that the caller no longer needs, so that memory stays bounded."""
        for session in sessions:
            self._keys_with_turns.discard(self._key(session))
            for trajectory in self._trajectories.pop(session, {}).values():
                for branch in range(len(trajectory.branches)):
                    self._outcomes.pop(Experience.id_of(trajectory.trajectory_id, branch), None)

    async def _read(self, topics: Topics) -> None:
        async for key in self._follow.keys(topics, Turn.topic):
            self._keys_with_turns.add(key)
        async for trajectory in self._follow.events(topics, Trajectory):
            self._trajectories.setdefault(trajectory.session_id, {})[trajectory.trajectory_id] = trajectory
        async for event in self._follow.events(topics, TrainingMetrics):
            if event.model == self._stack.model:
                self._account(event)

    def _account(self, event: TrainingMetrics) -> None:
        self.metrics = dict(event.metrics) or self.metrics
        if event.version is not None:
            self._versions[event.account] = event.version
        for outcome in event.verdicts:
            self._outcomes[outcome.experience_id] = (outcome.dropped or "", event.account)
        for undone in event.undone:
            if undone.queued:
                self._outcomes.pop(undone.experience_id, None)
            else:
                self._outcomes[undone.experience_id] = ("undone", event.account)
        for restored in event.restored:
            self._outcomes[restored.experience_id] = ("", event.account)

    def _outcome(self, session: str) -> SessionOutcome | None:
        """Return the training outcome of a session, or None while it is undecided for one of the session's turns."""
        if self._key(session) not in self._keys_with_turns:
            return SessionOutcome()
        closed = self._trajectories.get(session)
        if not closed:
            return None
        reasons, account, last = [], -1, None
        for last in closed.values():
            if last.untrained is not None or not last.branches:
                reasons.append(last.untrained or next((turn.full_reason for turn in last.left_out), "empty"))
            for branch in range(0 if last.untrained else len(last.branches)):
                outcome = self._outcomes.get(Experience.id_of(last.trajectory_id, branch))
                if outcome is None:
                    return None
                reasons.append(outcome[0])
                account = max(account, outcome[1])
        dropped = tuple(reason for reason in reasons if reason)
        return SessionOutcome(len(reasons) - len(dropped), dropped, self._versions.get(account), account, last)

    def _timeout_message(self, outcomes: dict[str, SessionOutcome | None], timeout_s: float) -> str:
        undecided = [session for session, outcome in outcomes.items() if outcome is None]
        examples = ", ".join(undecided[:_NAMED_MAX]) + (", ..." if len(undecided) > _NAMED_MAX else "")
        open_count = sum(session not in self._trajectories for session in undecided)
        return (
            f"{len(undecided)} of {len(outcomes)} sessions have no training outcome after {timeout_s:g} s "
            f"({examples}); "
            f"{open_count} of them are not closed; see `headrace status` and the trainer's log"
        )

    def _key(self, session: str) -> str:
        return ids.session_key(self._stack.tenant, session)
