"""Pairwise comparison of the runs of one task: the judged pairs, their results, and the win rate of each run.

A contest is the set of runs that one rubric compares for one task. The reward of a run is revised whenever one of its
pairs was judged. Each change of a contest first locks its row, because different replicas may receive the runs of one
task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, RowMapping, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge import scoring
from headrace_judge.scoring import Judgement
from headrace_judge.settings import PairSettings
from headrace_judge.tables import CONTESTANTS, CONTESTS, DEADLINE_JOB, PAIRS, VERDICT_JOB, PairTask, RunToJudge, Subject
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.storage.tables import count_rows, upsert
from headrace_runtime.stream.jobs import Job, Jobs, kind_of_tenant
from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.ids import derived_id
from headrace_schemas.values.text import printable

PAIRS_PER_TASK_MAX = 28
"""Pairs that are judged per task within one window, with two calls each. 28 are all pairs of 8 runs."""

_CONTESTANTS_MAX = 512
"""Runs of one contest that wait for rivals. Each decision reads all runs of its contest, and one task may be that of
all calls of a tenant."""


class PairwiseComparisons:
    """Pairwise comparisons in the database. All methods run in the caller's transaction."""

    def __init__(self, jobs: Jobs, settings: PairSettings) -> None:
        self._jobs = jobs
        self._wait = timedelta(seconds=settings.wait_s)
        self._window = timedelta(seconds=settings.comparable_s)
        self._pairs_max = PAIRS_PER_TASK_MAX

    async def add_run(self, tx: AsyncConnection, now: datetime, case: RunToJudge, trajectory: Trajectory) -> str | None:
        """Register a run for pairwise comparison with the other runs of its task, and queue one judge call per
        opponent.

        Returns:
            The reason why the run is not compared, or None.

        Raises:
            InvalidEvent: another tenant has a trajectory with this id.
        """
        subject = case.subject
        contest = derived_id("judge-contest", subject.rubric, subject.tenant, trajectory.purpose, trajectory.task_id)
        run = trajectory.run_id or subject.trajectory_id
        await _lock(tx, contest, now)
        key = {"rubric": subject.rubric, "trajectory_id": subject.trajectory_id}
        row = {"contest": contest, "run": run, "case": case.to_json(), "arrived_ms": epoch_ms(now)}
        if not await upsert(tx, CONTESTANTS, key, {**row, "closed": False, "revision": 0}, update=False):
            entered = await tx.scalar(select(CONTESTANTS.c.case).where(_is(subject.rubric, subject.trajectory_id)))
            if entered is not None and RunToJudge.model_validate_json(entered).subject.tenant != subject.tenant:
                name = printable(subject.trajectory_id)
                text = f"trajectory_id = {name!r}: another tenant has a trajectory with this id"
                raise InvalidEvent("trajectory_taken", text)
            return None
        of_contest = CONTESTANTS.c.contest == contest
        if await count_rows(tx, of_contest, CONTESTANTS, _CONTESTANTS_MAX + 1) > _CONTESTANTS_MAX:
            await tx.execute(delete(CONTESTANTS).where(_is(subject.rubric, subject.trajectory_id)))
            return f"its task has {_CONTESTANTS_MAX} other runs that wait for comparison"
        for rival in await self._opponents(tx, now, contest, run):
            pair = derived_id("judge-pair", subject.rubric, rival, subject.trajectory_id)
            columns = {"pair": pair, "contest": contest, "made_ms": epoch_ms(now)}
            await tx.execute(insert(PAIRS).values(**columns, first=rival, second=subject.trajectory_id))
            task = PairTask(rubric=subject.rubric, pair=pair, traceparent=subject.traceparent)
            await self._jobs.enqueue(tx, pair, kind_of_tenant(VERDICT_JOB, subject.tenant), task.to_json(), now)
        deadline = derived_id("judge-deadline", subject.rubric, subject.trajectory_id)
        await self._jobs.enqueue(tx, deadline, DEADLINE_JOB, subject.to_json(), now + self._wait)
        return None

    async def load_pair(self, tx: AsyncConnection, task: PairTask) -> tuple[RunToJudge, RunToJudge] | None:
        """Return the two runs of a queued comparison, or None if the comparison was deleted in the meantime."""
        row = await _pair(tx, task)
        if row is None:
            return None
        cases = {name: (await _contestant(tx, task.rubric, row[name]))["case"] for name in ("first", "second")}
        return RunToJudge.model_validate_json(cases["first"]), RunToJudge.model_validate_json(cases["second"])

    async def record_judgement(
        self, tx: AsyncConnection, now: datetime, task: PairTask, judgement: Judgement, judged_by: str
    ) -> list[Reward]:
        """Store the judgement of a pair, and return the revised rewards of both runs.

        Args:
            tx: the transaction.
            now: the present time.
            task: the judged pair.
            judgement: result for the first run of the pair.
            judged_by: name of the judge for the rewards.
        """
        row = await _pair(tx, task)
        if row is None:
            return []
        await _lock(tx, row["contest"], now)
        columns = {"judgement": judgement.model_dump_json().encode()}
        await tx.execute(update(PAIRS).where(PAIRS.c.pair == task.pair).values(columns))
        rewards = []
        for trajectory_id in (row["first"], row["second"]):
            win_rate = await _win_rate(tx, row["contest"], trajectory_id)
            if win_rate is not None:
                rewards.append(await _reward(tx, now, task.rubric, trajectory_id, win_rate, judged_by))
        await _delete_finished(tx, row["contest"])
        return rewards

    async def handle_deadline(
        self, tx: AsyncConnection, now: datetime, job: Job, judged_by: Mapping[str, str]
    ) -> list[Reward]:
        """Handle a deadline of a run: the end of its wait for a first pair, or of the window in which it gets pairs.

        At the end of its wait, a run without a pair gets an abstention, which is returned. After its window a run gets
        no more pairs.
        """
        subject = Subject.model_validate_json(job.payload)
        row = await _contestant(tx, subject.rubric, subject.trajectory_id)
        await _lock(tx, row["contest"], now)
        window_end = from_epoch_ms(row["arrived_ms"]) + self._window
        rewards = []
        results = await _pair_results(tx, row["contest"], subject.trajectory_id)
        if not results and row["revision"] == 0:
            abstention = Judgement(outcome="abstained", reason=await self._reason_without_pairs(tx, row))
            name = judged_by.get(subject.rubric, subject.rubric)
            rewards = [await _reward(tx, now, subject.rubric, subject.trajectory_id, abstention, name)]
        if now < window_end:
            await self._jobs.postpone(tx, job, window_end)
        else:
            await self._jobs.finish(tx, job)
            await tx.execute(update(CONTESTANTS).where(_is(subject.rubric, subject.trajectory_id)).values(closed=True))
            await _delete_finished(tx, row["contest"])
        return rewards

    async def _reason_without_pairs(self, tx: AsyncConnection, row: RowMapping) -> str:
        """Return the reason, for an abstention, why a run was compared with no other run."""
        other_runs = (CONTESTANTS.c.contest == row["contest"]) & (CONTESTANTS.c.run != row["run"])
        if await tx.scalar(select(CONTESTANTS.c.trajectory_id).where(other_runs).limit(1)):
            return f"its task had all its pairs already ({self._pairs_max})"
        return f"no other run of its task arrived within {self._wait.total_seconds():g} s"

    async def _opponents(self, tx: AsyncConnection, now: datetime, contest: str, run: str) -> list[str]:
        """Choose the runs that a new run is compared with, and return their trajectory ids, the oldest first.

        Their number is limited, as is the number of pairs of one task.
        """
        recent = sum(row["made_ms"] >= epoch_ms(now - self._window) for row in await _pairs(tx, contest))
        waiting = (
            select(CONTESTANTS.c.trajectory_id)
            .where(CONTESTANTS.c.contest == contest, CONTESTANTS.c.run != run, CONTESTANTS.c.closed.is_(False))
            .order_by(CONTESTANTS.c.arrived_ms, CONTESTANTS.c.trajectory_id)
        )
        return list((await tx.execute(waiting.limit(max(0, self._pairs_max - recent)))).scalars())


async def _lock(tx: AsyncConnection, contest: str, now: datetime) -> None:
    """Lock the database row with the comparisons of one task until `tx` ends."""
    await upsert(tx, CONTESTS, {"contest": contest}, {"touched_ms": epoch_ms(now)})


def _is(rubric: str, trajectory_id: str) -> ColumnElement[bool]:
    return (CONTESTANTS.c.rubric == rubric) & (CONTESTANTS.c.trajectory_id == trajectory_id)


async def _contestant(tx: AsyncConnection, rubric: str, trajectory_id: str) -> RowMapping:
    return (await tx.execute(select(CONTESTANTS).where(_is(rubric, trajectory_id)))).mappings().one()


async def _pair(tx: AsyncConnection, task: PairTask) -> RowMapping | None:
    return (await tx.execute(select(PAIRS).where(PAIRS.c.pair == task.pair))).mappings().one_or_none()


async def _pairs(tx: AsyncConnection, contest: str) -> Sequence[RowMapping]:
    return (
        (await tx.execute(select(PAIRS).where(PAIRS.c.contest == contest).order_by(PAIRS.c.made_ms))).mappings().all()
    )


async def _pair_results(tx: AsyncConnection, contest: str, trajectory_id: str) -> list[tuple[str, Judgement | None]]:
    """Return each opponent of a run with the judgement for this run, or None while the pair is not judged."""
    results: list[tuple[str, Judgement | None]] = []
    for row in await _pairs(tx, contest):
        judgement = row["judgement"] and Judgement.model_validate_json(row["judgement"])
        if row["first"] == trajectory_id:
            results.append((row["second"], judgement))
        elif row["second"] == trajectory_id:
            results.append((row["first"], judgement and scoring.swap_runs(judgement)))
    return results


async def _win_rate(tx: AsyncConnection, contest: str, trajectory_id: str) -> Judgement | None:
    results = await _pair_results(tx, contest, trajectory_id)
    judged = [(opponent, judgement) for opponent, judgement in results if judgement is not None]
    return scoring.win_rate(judged, waiting=len(results) - len(judged))


async def _reward(
    tx: AsyncConnection, now: datetime, rubric: str, trajectory_id: str, judgement: Judgement, judged_by: str
) -> Reward:
    """Return the next revision of a run's reward, and count up the stored revision number."""
    row = await _contestant(tx, rubric, trajectory_id)
    await tx.execute(update(CONTESTANTS).where(_is(rubric, trajectory_id)).values(revision=row["revision"] + 1))
    subject = RunToJudge.model_validate_json(row["case"]).subject
    return subject.reward(judgement, now, judged_by, row["revision"])


async def _delete_finished(tx: AsyncConnection, contest: str) -> None:
    """Delete the runs of a contest (the compared runs of one task) whose comparisons are finished.

    These are runs that are compared with no further runs and whose pairs are all judged. Pairs without a remaining run
    are deleted too, and with the last run the row of the contest.
    """
    pairs = await _pairs(tx, contest)
    pending = {name for row in pairs if row["judgement"] is None for name in (row["first"], row["second"])}
    query = select(CONTESTANTS.c.trajectory_id, CONTESTANTS.c.closed).where(CONTESTANTS.c.contest == contest)
    closed = {row["trajectory_id"]: row["closed"] for row in (await tx.execute(query)).mappings()}
    finished = {name for name, is_closed in closed.items() if is_closed} - pending
    remaining = set(closed) - finished
    without_runs = [row["pair"] for row in pairs if not {row["first"], row["second"]} & remaining]
    in_contest = CONTESTANTS.c.contest == contest
    await tx.execute(delete(CONTESTANTS).where(in_contest, CONTESTANTS.c.trajectory_id.in_(finished)))
    await tx.execute(delete(PAIRS).where(PAIRS.c.pair.in_(without_runs)))
    if not remaining:
        await tx.execute(delete(CONTESTS).where(CONTESTS.c.contest == contest))
